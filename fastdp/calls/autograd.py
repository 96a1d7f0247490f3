"""Autograd's graph of a loss: its nodes, and the tensors from which it follows by sums alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

#: Operations that are linear in their only operand with a gradient; or in the dividend.
_SUMS = re.compile(
    r"(Add|Alias|Bmm|Cat|Clone|Diagonal|Div|Dot|Expand|Mean|Mm|Mul|Mv|Neg|Permute|Repeat|ReshapeAlias|Rsub|Select|Slice|Split|"
    r"Squeeze|Stack|Sub|Sum|T|ToCopy|Trace|Transpose|Unbind|UnsafeView|Unsqueeze|View)Backward\d"
)
_PRODUCTS = ("Bmm", "Dot", "Mm", "Mul", "Mv")


def _operands(node: Any) -> list[Any]:
    """What a node of autograd's graph makes a weighted sum of, as edges; nothing for other operations."""
    edges, name = [edge for edge in node.next_functions if edge[0] is not None], node.name()
    product = name.startswith(_PRODUCTS) and len(edges) > 1
    divisor = name.startswith("Div") and edges != [*node.next_functions[:1]]
    return edges if _SUMS.fullmatch(name) and not (product or divisor) else []


def graph_of(total: torch.Tensor) -> Iterator[Any]:
    """The nodes of a tensor's graph, each once."""
    return _nodes([total.grad_fn])


def _nodes(waiting: list[Any]) -> Iterator[Any]:
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            yield node
            seen.add(node)
            waiting += [function for function, _ in node.next_functions]


def summands(
    total: torch.Tensor, known: Mapping[tuple[Any, int], torch.Tensor], leaves: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The ``known`` tensors, by their edges, of which a loss is a weighted sum, along with some ``leaves``; none if it is not.

    Of several on one path it is the first, unless others are computed from that one by more than sums: then it is the last.
    """
    ids, top = set(map(id, leaves)), (total.grad_fn, total.output_nr)
    follows, waiting = dict[Any, bool](), [top]

    def below_of(edge: tuple[Any, int]) -> list[Any]:
        edges = _operands(edge[0])
        # A constant that was added shows in no graph.
        return (
            [] if edge in known and len(edges) == 1 and edge[0].name().startswith(("AddB", "Rsub", "SubB")) else edges
        )

    while waiting:
        inner = below_of(waiting[-1])
        if missing := [edge for edge in inner if edge not in follows]:
            waiting += missing
            continue
        edge = waiting.pop()
        end = edge in known or id(getattr(edge[0], "variable", None)) in ids
        follows[edge] = end or (bool(inner) and all(follows[below] for below in inner))
    if not follows[top]:
        return []
    path, first, last, reached = {top}, list[Any](), list[Any](), [(top, False)]
    for edge, summed in reached:
        inner = below_of(edge)
        if edge in known and not summed:
            last.append(edge)
        if inner and all(follows[below] for below in inner):
            reached += [(below, summed or edge in known) for below in inner if below not in path]
            path.update(inner)
        elif edge in known:
            first.append(edge)
    ends = {node for node, _ in first}
    inputs = [node for end in ends for node, _ in end.next_functions]
    nested = len(ends) > 1 and not ends.isdisjoint(_nodes(inputs))
    return [known[edge] for edge in (last if nested else first)]
