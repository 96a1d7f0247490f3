"""Public shapes: whatever one record is, the others' gradients are the same to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import fastdp
from fastdp.data import Collator
from fastdp.ops.stream import NoiseStream
from fastdp.private.observer import Observer
from fastdp.private.sampler import PoissonSampler, ShuffledSampler
from fastdp.private.shapes import TAIL, PublicPlaces, PublicShapes, ShapedCollator, shape_statement
from tests.engine.models import build
from tests.engine.test_others import Bag, collate

#: Records beside the one that changes, which is the last.
OTHERS = 11


class Sums(Observer):
    """Keeps the clipped sums of a step; leaves a unit out of each draw."""

    def __init__(self, without: int | None):
        self.without = without

    def drawn(self, units: list[int], kind: str) -> list[int]:
        return [unit for unit in units if unit != self.without]

    def before_release(self, accumulator: Any) -> None:
        self.sums = {name: total.clone() for name, total in accumulator.sums.items()}


class Regression(nn.Module):
    """One float32 layer of one output; records are below the bound, so that last bits of the output reach the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(300, 1, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layer(x)[:, 0], y)}


def text(length: int, seed: int) -> dict[str, Any]:
    ids = torch.randint(1, 61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return {"input_ids": ids, "labels": ids}


def vector(length: int, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(300, generator=generator) * length * 1e-4, "y": torch.rand((), generator=generator) * 1e-4}


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "llama": (lambda: build("llama").bfloat16(), text, Collator(0)),
    "gpt2": (lambda: build("gpt2").bfloat16(), text, Collator(0)),
    "linear": (Regression, vector, torch.utils.data.default_collate),
}


def begun(model: nn.Module, loader: Any, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    return fastdp.make_private(
        model, optimizer, loader, **{"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": 1, **options}
    )


def sums_of_others(name: str, records: list[Any], *, without: int | None = None, **options: Any) -> dict[str, Any]:
    """The clipped sums of one step in which everyone is drawn, and the last unit weighs nothing or is left out."""
    make, _, collate = MODELS[name]
    torch.manual_seed(0)
    users = options.get("user_ids", range(len(records)))
    loader = torch.utils.data.DataLoader(records, batch_size=len({*users}), collate_fn=collate)  # type: ignore[arg-type, var-annotated]
    method = fastdp.DPSGD(max_grad_norm=0.1)
    private = begun(make(), loader, noise_multiplier=0.0, unsafe_seed=3, method=method, **options)
    seen = Sums(without)
    private.observe(seen)
    for batch in private.data_loader:
        ticket = private.data_loader.tickets[-1]
        last = torch.tensor([users[index] == users[-1] for index in ticket.source.indices])
        last = last[torch.searchsorted(ticket.row_units, torch.arange(len(ticket.weights)))]
        private.data_loader.tickets[-1] = dataclasses.replace(ticket, weights=ticket.weights * ~last)
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.detach()
    return seen.sums


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(total, other[name]) for name, total in one.items())


@pytest.mark.parametrize("name", ["linear", "llama", pytest.param("gpt2", marks=pytest.mark.slow)])
@settings(max_examples=3, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 15), min_size=OTHERS, max_size=OTHERS),
    length=st.integers(2, 40),
    seed=st.integers(0, 99),
    rows=st.sampled_from((4, 5, 12)),
    grid=st.sampled_from(("public", (64,), (16, 48))),
)
def test_one_record_changes_no_bit_of_the_others(
    name: str, lengths: list[int], length: int, seed: int, rows: int, grid: Any
) -> None:
    """A record is replaced by a longer, shorter or equal one, and left out."""
    record = MODELS[name][1]
    others = [record(own, number) for number, own in enumerate(lengths)]
    options = {"max_physical_batch_size": rows, "shapes": grid, "self_check": False}
    first = sums_of_others(name, [*others, record(15, 100 + seed)], **options)
    assert any(total.abs().max() > 0 for total in first.values())
    assert same(first, sums_of_others(name, [*others, record(length, 200 + seed)], **options))
    assert same(first, sums_of_others(name, [*others, record(15, 100 + seed)], without=OTHERS, **options))


def test_a_longer_bag_changes_no_bit_of_512_equal_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without public shapes it moves their sum, by no more than cards state (`tests/engine/test_others.py`)."""
    monkeypatch.setitem(MODELS, "bag", (lambda: Bag(16), None, collate))

    def bag(length: int, seed: int) -> dict[str, torch.Tensor]:
        rows = torch.randn(length, 16, generator=torch.Generator().manual_seed(seed))
        return {"x": rows, "y": torch.tensor(1.0)}

    def moved(shapes: Any) -> float:
        options = {"shapes": shapes, "self_check": False}
        first, second = (sums_of_others("bag", [*[bag(2, 1)] * 512, bag(own, 2)], **options) for own in (2, 64))
        return float((first["layer.weight"].double() - second["layer.weight"]).norm()) / 0.1

    assert moved({"lengths": [4, 96], "pad": {"x": 0.0}}) == 0
    assert moved(None) > 0


@pytest.mark.parametrize("name", ["linear", pytest.param("gpt2", marks=pytest.mark.slow)])
@settings(max_examples=3, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3), min_size=5, max_size=5),
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=3),
    seed=st.integers(0, 99),
    rows=st.sampled_from((4, 9, 24)),
)
def test_one_user_changes_no_bit_of_the_others(
    name: str, counts: list[int], lengths: list[int], seed: int, rows: int
) -> None:
    """A user's records are others, of other lengths and number, or the user is left out."""
    record = MODELS[name][1]
    users = [user for user, count in enumerate(counts) for _ in range(count)]
    others = [record(2 + 3 * user + number % 5, number) for number, user in enumerate(users)]

    def sums(own: list[int], seed: int, without: int | None = None) -> dict[str, Any]:
        records = [*others, *[record(length, seed + number) for number, length in enumerate(own)]]
        # Places have the rows of three records, whoever is there.
        ids, spare = [*users, *[5] * len(own), 6, 6, 6], [record(9, 50 + number) for number in range(3)]
        options = {"max_physical_batch_size": rows, "shapes": "public", "self_check": False}
        order = sorted(range(len(ids)), key=lambda row: ids[row] == 5)
        return sums_of_others(name, [[*records, *spare][row] for row in order], without=without, **options,
                              user_ids=[ids[row] for row in order], max_examples_per_user=3)  # fmt: skip

    first = sums([15], 100)
    assert any(total.abs().max() > 0 for total in first.values())
    assert same(first, sums(lengths, 200 + seed))
    assert same(first, sums([15], 100, without=6))


@pytest.mark.parametrize("name", MODELS)
def test_without_public_shapes_a_record_changes_bits_of_the_others(name: str) -> None:
    """What the property above would find."""
    record = MODELS[name][1]

    def changed(count: int) -> bool:
        records = [record(5 + number, number) for number in range(count)] + [record(40, 300)]
        return not same(*(sums_of_others(name, records, without=own, self_check=False) for own in (None, count)))

    assert any(map(changed, (3, 7, 11)))


def epoch(records: list[Any], collate: Any, **options: Any) -> Iterator[tuple[Any, Any]]:
    """The batches of one epoch, with all checks, and their tickets."""
    loader = torch.utils.data.DataLoader(records, batch_size=10, collate_fn=collate)
    private = begun(build("llama"), loader, shapes="public", **options)
    for batch in private.data_loader:
        yield batch, private.data_loader.tickets[-1]
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    assert private.steps_done == 3
    (sentence,) = [said for said in private.card()["remaining"] if "the shape" in said]
    assert sentence.startswith("one unit changes no bit of another's gradient")
    private.detach()


def test_every_batch_has_a_public_shape_and_ends_in_padding() -> None:
    records = [text(2 + 2 * (number % 15), number) for number in range(30)]
    last = 0
    for batch, ticket in epoch(records, Collator(0), max_physical_batch_size=4):
        rows, length = batch["input_ids"].shape
        assert (rows, length in (4, 8, 16, 32)) == (4, True)
        assert not batch["attention_mask"][:, -1].any()
        assert not (ticket.weights != 0).logical_xor(ticket.weights == 1).any()
        last += ticket.is_last
        if ticket.probe is None and ticket.weights.any():
            for row, index in enumerate(ticket.source.indices):
                own = len(records[index]["input_ids"])
                assert batch["attention_mask"][row].sum() == own < length <= max(4, 2 * own)
    assert last == 3


def test_the_number_of_microbatches_follows_from_public_numbers() -> None:
    sampler = PoissonSampler(1000, 0.05, NoiseStream())
    most = sampler.most(TAIL)
    assert PublicPlaces(sampler, 1000).microbatches == 1
    places = PublicPlaces(sampler, 16)
    assert places.microbatches == -(-most // 16)
    for drawn in (range(0), range(1), range(50), range(most)):
        made = places.of(drawn, NoiseStream().permutation)
        assert [len(own) for own in made] == [places.rows] * places.microbatches
        assert sorted(unit for own in made for unit in own if unit is not None) == list(drawn)
    # More than the probability allows: every unit still has a place.
    assert sum(unit is not None for own in places.of(range(1000), NoiseStream().permutation) for unit in own) == 1000


def test_no_batch_exceeds_its_places_but_by_the_stated_probability() -> None:
    from scipy.stats import binom

    most = PoissonSampler(42000, 64 / 42000, NoiseStream()).most(TAIL)
    assert binom.sf(most, 42000, 64 / 42000) <= TAIL < binom.sf(most - 1, 42000, 64 / 42000)
    assert ShuffledSampler(100, 7, NoiseStream()).most(TAIL) == 7
    assert PoissonSampler(7, 1.0, NoiseStream()).most(TAIL) == 7


class Tokenized:
    """A collator of a tokenizer that pads on the left."""

    class tokenizer:
        padding_side, pad_token_id = "left", 7

    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        longest = max(map(len, rows))
        ids = torch.tensor([[7] * (longest - len(row)) + row for row in rows])
        return {"input_ids": ids, "labels": torch.rand(len(rows), 3)}


def test_the_tokenizers_side_and_pad_token_are_kept_and_labels_of_classes_are_no_sequence() -> None:
    collator = ShapedCollator(Tokenized(), PublicShapes((4, 8)))
    ((first, short), (second, long)) = collator.parts([[1, 2], [1, 2, 3, 4], [5]])
    assert (first, second) == ([0, 0, 2], [1, 1, 1])
    assert short["input_ids"].tolist() == [[7, 7, 1, 2], [7, 7, 1, 2], [7, 7, 7, 5]]
    assert long["input_ids"].tolist() == [[7, 7, 7, 7, 1, 2, 3, 4]] * 3
    assert short["labels"].shape == (3, 3)


def test_padding_that_is_not_known_is_asked_for() -> None:
    def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"frames": nn.utils.rnn.pad_sequence(rows, batch_first=True)}

    rows = [torch.ones(2, 3), torch.ones(5, 3)]
    with pytest.raises(ValueError, match=r"\['frames'\] may need padding.* give shapes=\{'pad': \{'frames': value\}\}"):
        [*ShapedCollator(collate, PublicShapes()).parts(rows)]
    collator = ShapedCollator(collate, PublicShapes.of({"pad": {"frames": -1}, "lengths": [8]}))  # type: ignore[arg-type]
    ((_, batch),) = collator.parts(rows)
    assert batch["frames"].shape == (2, 8, 3)
    assert bool((batch["frames"][:, 5:] == -1).all())


def test_rows_of_one_size_need_padding_only_where_a_mask_may_cover_them() -> None:
    collate = torch.utils.data.default_collate
    rows = [{"input_ids": torch.full((4,), number)} for number in range(3)]
    ((_, batch),) = ShapedCollator(collate, PublicShapes()).parts(rows)
    assert batch["input_ids"].shape == (3, 4)
    masked = [{**row, "attention_mask": torch.ones(4, dtype=torch.long)} for row in rows]
    with pytest.raises(ValueError, match=r"\['input_ids', 'attention_mask'\] may need padding"):
        [*ShapedCollator(collate, PublicShapes()).parts(masked)]


@pytest.mark.parametrize("shapes", ["private", 64, {"length": [64]}, [0], [2.5]])
def test_other_shapes_are_refused(shapes: Any) -> None:
    with pytest.raises(ValueError, match="shapes is|shapes has the lengths"):
        PublicShapes.of(shapes)


def test_a_row_beyond_the_public_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match=r"A row has 8 tokens, and public lengths end at 8. Truncate rows to 7"):
        [*ShapedCollator(Tokenized(), PublicShapes((4, 8))).parts([[1] * 8])]


def test_a_card_says_what_shapes_leave_where_they_are_not_public() -> None:
    found = []
    for isolation, shapes in ((None, None), ("per_example", None), ("per_example", "public")):
        loader = torch.utils.data.DataLoader([text(3, 0), text(4, 1)], batch_size=1, collate_fn=Collator(0))
        private = begun(build("llama"), loader, isolation=isolation, shapes=shapes)
        found += [said for said in private.card()["remaining"] if "the shape" in said]
        private.detach()
    assert "products round by the shape of their microbatch" in found[0]
    assert "GPU" not in found[0]
    assert "on a GPU the route to norms follows it too" in shape_statement(False, on_gpu=True)
    assert all(said.startswith("one unit changes no bit of another's gradient") for said in found[1:])
