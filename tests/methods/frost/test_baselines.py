"""The other ways to choose: by chance, by value, and single entries."""

import math
from collections import deque

import pytest
import torch
from hypothesis import given, settings, strategies as st

from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.engine import Engine
from fastdp.methods.frost import DPFrost
from fastdp.methods.frost.masked import MaskedPolicy, largest
from fastdp.verify import Checks
from tests.engine import models, reference
from tests.engine.reference import known
from tests.engine.runs import collate, examples, logical_step, one_by_one
from tests.methods.frost.test_method import Deep, start, trained


def test_what_reads_no_private_data_costs_nothing() -> None:
    for method in (
        DPFrost(unfreezing_ratio=0.5, choose_by="random"),
        DPFrost(unfreezing_ratio=0.5, choose_by="values"),
        DPFrost(unfreezing_ratio=0.5, choose_by="values", granularity="parameters"),
    ):
        private = start(method=method, target_epsilon=3.0, target_delta=1e-3)
        assert list(private.ledger.kinds) == ["step"]
        next(iter(private.data_loader))
        assert private.epsilon() == 0
        assert "reads no private data" in private.card()["notes"][0]


def test_random_partitions_depend_on_the_seed_alone() -> None:
    chosen = []
    for seed in (0, 0, 1, 2, 3):
        private = start(method=DPFrost(unfreezing_ratio=0.5, choose_by="random", seed=seed))
        next(iter(private.data_loader))
        chosen.append(trained(private))
    assert chosen[0] == chosen[1]
    assert len({frozenset(c) for c in chosen}) > 1


def test_partitions_by_value_are_those_with_the_largest_mean() -> None:
    model = Deep()
    with torch.no_grad():
        model.layers[1].weight.mul_(100)
    private = start(model, DPFrost(unfreezing_ratio=0.4, choose_by="values"))
    next(iter(private.data_loader))
    assert {"layers.1.weight", "layers.1.bias"} <= trained(private)


@pytest.mark.parametrize("unchosen", [None, 1])
def test_single_entries_by_value_are_the_only_ones_that_move(unchosen: int | None) -> None:
    """Where a layer in the middle has none, too: what is left keeps its places in the noise. Rounded, some of it would be 0."""
    model = Deep()
    if unchosen is not None:
        with torch.no_grad():
            for parameter in model.layers[unchosen].parameters():
                parameter.zero_()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    method = DPFrost(unfreezing_ratio=0.25, choose_by="values", granularity="parameters")
    private = start(model, method, optimizer=optimizer, noise_multiplier=1.0, secure_rounding=False)
    logical_step(private)
    flat = torch.cat([p.reshape(-1) for p in before.values()]).abs()
    threshold = flat.sort(descending=True).values[int(0.25 * len(flat))]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter != before[name], before[name].abs() > threshold), name


def test_single_entries_by_noisy_gradients() -> None:
    """PARAM: one vector of all clipped absolute gradients is released; its largest entries are chosen."""
    model = Deep()
    gradients = one_by_one(model, collate(examples(24)))
    norms = [torch.cat([g.reshape(-1) for g in one.values()]).norm(p=1) for one in gradients]
    clipped = [{n: g.abs() * (0.1 / norm).clamp(max=1) for n, g in one.items()} for one, norm in zip(gradients, norms)]
    scores = {n: torch.stack([one[n] for one in clipped]).sum(0) for n in clipped[0]}
    expected = largest(scores, 0.1)
    method = DPFrost(
        unfreezing_ratio=0.1,
        granularity="parameters",
        max_grad_norm=0.1,
        selection_steps=1,
        selection_rate=1.0,
        selection_noise_multiplier=0.0,
    )
    private = start(model, method)
    next(iter(private.data_loader))
    assert private.ledger.spent("selection") == 1
    masks = {name.removeprefix("mask."): mask for name, mask in private.outcome.items()}
    assert sum(int(m.sum()) for m in masks.values()) == sum(int(m.sum()) for m in expected.values()) == 14
    # Near the last place entries may change places by rounding; what is chosen is worth the same.
    found, best = (sum(float(scores[n][m[n]].sum()) for n in scores) for m in (masks, expected))
    assert found == pytest.approx(best, rel=1e-5)
    assert trained(private) == {name for name, mask in masks.items() if mask.any()}


def test_noise_reaches_every_entry_of_a_single_entry_selection() -> None:
    """With noise that drowns the gradients the choice is even: 12 of the 123 entries, few of which lie in the last layer."""
    method = DPFrost(
        unfreezing_ratio=0.1,
        granularity="parameters",
        selection_steps=1,
        selection_rate=1.0,
        selection_noise_multiplier=1e6,
    )
    private = start(method=method, noise_multiplier=1.0)
    next(iter(private.data_loader))
    last = sum(int(mask.sum()) for name, mask in private.outcome.items() if "layers.3" in name)
    assert last <= 9


def test_masked_gradients_are_clipped_inside_and_zero_outside() -> None:
    mask = torch.tensor([True, False])
    policy = MaskedPolicy.of({"a": mask}, 0.5, 2.0)
    assert policy.noise_multiplier == 2.0
    scales = policy.scales(known(torch.tensor([[4.0, 0.01], [1.0, 1.0]])))
    assert torch.allclose(scales, torch.tensor([[0.25, 1.0], [0.0, 0.0]]))


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_masked_gradients_of_a_model_with_tables(name: str) -> None:
    """What the engine clips and sums inside masks is what autograd gives, example by example; tables included."""
    model, batch = models.build(name), models.batch(name)
    generator = torch.Generator().manual_seed(0)
    masks = {n: torch.rand(p.shape, generator=generator) < 0.3 for n, p in model.named_parameters()}
    gradients = reference.one_at_a_time(model, batch, shift=name == "gpt2")
    inside = [{n: torch.where(masks[n], g, 0) for n, g in one.items()} for one in gradients]
    norms = reference.norms(inside)
    policy = MaskedPolicy.of(masks, float(norms.median()) * 1.001, 0.0)
    engine = Engine(model, policy, deque([reference.ticket(4)]), verify=Checks)
    model(**batch).loss.backward()
    engine.close()
    for n, total in engine.accumulator.sums.items():
        parts = [one[n] * (policy.bounds[0] / norm).clamp(max=1) for one, norm in zip(inside, norms)]
        expected = torch.stack([part.expand(masks[n].shape) for part in parts]).sum(0)
        assert torch.allclose(total.double(), expected, rtol=1e-3, atol=1e-5), n


def test_ties_at_the_last_place_are_left_out() -> None:
    masks = largest({"a": torch.tensor([3.0, 2.0, 2.0, 1.0])}, 0.5)
    assert masks["a"].tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match="is not one"):
        largest({"a": torch.ones(4)}, 0.1)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    ratio=st.floats(0.05, 0.95),
    log_scale=st.floats(-3, 6),
    bound=st.floats(0.05, 5),
    undone=st.booleans(),
)
def test_one_example_moves_the_chosen_entries_by_no_more_than_the_bound(
    seed: int, ratio: float, log_scale: float, bound: float, undone: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 4), "b": (5,)}
    masks = {name: torch.rand(shape, generator=generator) < ratio for name, shape in shapes.items()}
    policy = MaskedPolicy.of(masks, bound, 1.0)
    accumulator = Accumulator({name: torch.nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}, policy)

    def unit() -> dict[str, torch.Tensor]:
        return {name: 10**log_scale * torch.randn(1, *shape, generator=generator) for name, shape in shapes.items()}

    first = unit()
    accumulator.add_unit(first, torch.ones(1))
    before = {name: total.clone() for name, total in accumulator.sums.items()}
    # An example that undoes another cancels in the sum, and must not escape its bound by it.
    accumulator.add_unit({name: -g for name, g in first.items()} if undone else unit(), torch.ones(1))
    moved = {name: (total - before[name]).double() for name, total in accumulator.sums.items()}
    assert math.sqrt(sum(float(part.square().sum()) for part in moved.values())) <= bound * (1 + 1e-5)
    assert all(not part[~masks[name]].any() for name, part in moved.items()), "an entry outside was released"
