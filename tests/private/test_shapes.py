"""Public shapes: the arithmetic of other records is the same, bit for bit, with and without one record."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from fastdp.engine.routing import Routing
from fastdp.private.shapes import Piece, grid, padded, pieces, ticket_of
from tests.engine.reference import engine_for

LENGTHS, ROWS, CLIP = (8, 16, 40), 4, 0.5
FILL = {"labels": -100}


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 30), st.integers(1, 40))
def test_shapes_are_those_of_the_grid_and_every_unit_comes_once(tokens: list[int], at: int, extra: int) -> None:
    found = pieces(range(len(tokens)), lambda unit: (1, tokens[unit]), LENGTHS, ROWS)
    assert sorted(unit for piece in found for unit in piece.units) == list(range(len(tokens)))
    assert all(len(piece.units) + piece.filled == ROWS for piece in found)
    assert all(tokens[unit] <= piece.length for piece in found for unit in piece.units)
    # One record more: every other one has rows of the same length.
    more = [*tokens[:at], extra, *tokens[at:]]
    own = {unit: piece.length for piece in found for unit in piece.units}
    place = min(at, len(tokens))
    for piece in pieces(range(len(more)), lambda unit: (1, more[unit]), LENGTHS, ROWS):
        for unit in piece.units:
            if unit != place:
                assert own[unit - (unit > place)] == piece.length


def test_units_of_several_rows_stand_alone() -> None:
    found = pieces([0, 1, 2], lambda unit: ((1, 3, 1)[unit], 5), LENGTHS, ROWS)
    assert found == [Piece((0, 2), 8, 2), Piece((1,), 8, 1)]
    ticket = ticket_of(found[1], lambda unit: 3, is_last=True)
    assert ticket.row_units.tolist() == [0, 0, 0, 1]
    assert ticket.weights.tolist() == [1, 0]


@pytest.mark.parametrize(("size", "says"), [((1, 41), "longer than the grid"), ((5, 8), "does not fit into 4")])
def test_what_does_not_fit_is_refused(size: tuple[int, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        pieces([0], lambda unit: size, LENGTHS, ROWS)


def test_a_grid_ends_at_the_longest() -> None:
    assert grid(16) == (16,)
    assert grid(5) == (5,)
    with pytest.raises(ValueError, match="at least 1"):
        grid(0)


def summed(dtype: torch.dtype, texts: list[torch.Tensor], only: set[int]) -> dict[str, torch.Tensor]:
    """The clipped sums of all micro-batches of public shapes, of some texts alone: the others weigh 0."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=50, max_position_embeddings=64)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    engine, tickets = engine_for(model, CLIP, verify=Routing)
    total: dict[str, torch.Tensor] = {}
    # In float64 and apart from each other: the sum of micro-batches rounds among units, which is no shape's doing.
    for piece in pieces(range(len(texts)), lambda unit: (1, len(texts[unit])), LENGTHS, ROWS):
        rows = [texts[unit] for unit in piece.units]
        longest = max(map(len, rows))
        ids = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
        mask = torch.stack([(torch.arange(longest) < len(row)).long() for row in rows])
        batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}
        ticket = ticket_of(piece, lambda unit: 1, is_last=False)
        for at, unit in enumerate(piece.units):
            weights = torch.zeros_like(ticket.weights)
            weights[at] = float(unit in only)
            tickets.append(replace(ticket, weights=weights))
            engine.accumulator.reset()
            engine.model(**padded(batch, piece.length, piece.filled, FILL)).loss.backward()
            if unit in only:
                for name, own in engine.accumulator.sums.items():
                    total[name] = total.get(name, 0) + own.double()
    assert engine.route == "uses", engine.reason
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_record_changes_no_bit_of_the_others(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(0, 50, (length,), generator=generator) for length in (5, 7, 20, 8, 3, 30)]
    others = set(range(len(texts)))
    alone = summed(dtype, texts, others)
    x = torch.randint(0, 50, (37,), generator=generator)
    beside = summed(dtype, [*texts, x], others)
    assert alone
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
