"""Partitions of the trained parameters: what DP-FROST chooses between (section 4.3 of the paper)."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fastdp.validate import instance

#: Partitions of a user's own: names or shell patterns of parameters, by the partition's name or in a plain list.
Declared = Mapping[str, Sequence[str]] | Sequence[Sequence[str]]


@dataclass(frozen=True)
class Partition:
    """Parameters, by name, that are trained or frozen together."""

    name: str
    parameters: tuple[str, ...]
    #: |P|, the number of their entries.
    size: int


def split(parameters: Mapping[str, torch.Tensor], declared: Declared | None = None) -> tuple[Partition, ...]:
    """The partitions of these parameters: ``declared`` ones, or each weight with its bias.

    A bias joins the weight that its name answers to (``fc.bias`` to ``fc.weight``, ``in_proj_bias`` to
    ``in_proj_weight``); a parameter that no other answers to, such as a class token, is a partition of its own.
    """
    if declared is not None:
        return _declared(parameters, declared)
    members: dict[str, list[str]] = {}
    for name in parameters:
        members.setdefault(_weight_of(name, parameters), []).append(name)
    return tuple(
        Partition(weight.removesuffix(".weight"), tuple(names), _size(parameters, names))
        for weight, names in members.items()
    )


def _weight_of(name: str, parameters: Mapping[str, torch.Tensor]) -> str:
    module, dot, leaf = name.rpartition(".")
    weight = module + dot + leaf.replace("bias", "weight")
    return weight if weight in parameters else name


def _size(parameters: Mapping[str, torch.Tensor], names: Sequence[str]) -> int:
    return sum(parameters[name].numel() for name in names)


def _declared(parameters: Mapping[str, torch.Tensor], declared: Declared) -> tuple[Partition, ...]:
    instance(Mapping | Sequence, "lists of parameter names or patterns", partitions=declared)
    if not isinstance(declared, Mapping):
        declared = {f"{number} ({patterns[0]}, ...)": patterns for number, patterns in enumerate(declared) if patterns}
    owner: dict[str, str] = {}
    partitions = []
    for title, patterns in declared.items():
        if isinstance(patterns, str):
            raise ValueError(
                f"partition '{title}' is the text '{patterns}': give a list of parameter names or patterns"
            )
        names: list[str] = []
        for pattern in patterns:
            found = [name for name in parameters if fnmatch.fnmatchcase(name, pattern)]
            if not found:
                raise ValueError(
                    f"partition '{title}' names '{pattern}', which is no trained parameter: leave it out, or set "
                    "requires_grad=True"
                )
            for name in found:
                if name in owner:
                    raise ValueError(
                        f"{name} is listed twice, in partition '{owner[name]}' and in '{title}'; list it once"
                    )
                owner[name] = title
            names += found
        partitions.append(Partition(title, tuple(names), _size(parameters, names)))
    for name in parameters:
        if name not in owner:
            raise ValueError(
                f"the partitions do not cover the trained parameter {name}: add it to one, or set requires_grad=False"
            )
    return tuple(partitions)
