"""What is drawn by chance: from a seed where passes are repeated, from the operating system where records hide in it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from fastdp.engine.chance import secretly, seeded
from fastdp.engine.still import Chance, still, unchanged
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.errors import SelfCheckError
from tests.engine.nets import Net, trained
from tests.engine.runs import Batch, Classifier, collate, examples


def drawn() -> tuple[Any, ...]:
    return *torch.rand(4).tolist(), random.random(), *numpy.random.rand(2)  # noqa: NPY002


@pytest.mark.parametrize("context", [secretly, lambda: seeded(3)])
def test_states_are_put_back(context: Any) -> None:
    with seeded(7):
        without = drawn()
    with seeded(7):
        with context():
            drawn()
        assert drawn() == without


def test_what_is_drawn_secretly_is_never_the_same() -> None:
    seen = set()
    for _ in range(20):
        with seeded(7), secretly():
            seen.update(drawn())
    assert len(seen) == 20 * 7


def test_secret_draws_are_uniform() -> None:
    """Kolmogorov's distance of 200,000 draws; above 2.6 / sqrt(n) by chance in fewer than 3 of a million runs."""
    parts = []
    for _ in range(200):
        with secretly():
            parts.append(torch.rand(1000, dtype=torch.float64))
    values = torch.cat(parts).sort().values
    ideal = torch.arange(1, len(values) + 1, dtype=torch.float64) / len(values)
    assert float((values - ideal).abs().max()) < 2.6 / len(values) ** 0.5


class Dropping(Classifier):
    """Notes the mask of each row."""

    masks: list[torch.Tensor]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        if torch.is_grad_enabled():
            self.masks.append(mask)
        return super().logits(x * mask)


def masks(**options: Any) -> tuple[list[torch.Tensor], list[Batch]]:
    """Of the micro-batches of an epoch that begins with a seed, and what the collator drew for each."""
    torch.manual_seed(0)
    model = Dropping()
    model.masks = []
    drawn: list[Batch] = []

    def noisy(items: Any) -> Batch:
        batch = collate(items)
        return {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}

    loader = DataLoader(examples(), batch_size=24, collate_fn=noisy)
    torch.manual_seed(0)
    private = fastdp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epochs=1, self_check=False, **options
    )
    for batch in private.data_loader:
        drawn.append(batch)
        model.masks.clear()
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    private.detach()
    return list(model.masks), drawn


def test_a_seed_that_others_know_tells_no_mask_and_no_augmentation() -> None:
    """A row's mask would follow from its place, which one record more shifts: the others' shares would move without bound."""
    noised = {"noise_multiplier": 1.0, "target_delta": 1e-3}
    (one, batches), (two, others) = masks(**noised), masks(**noised)
    assert len(one) == len(two) > 0
    assert not any(map(torch.equal, one, two))
    assert not torch.equal(batches[0]["x"][0], others[0]["x"][0])
    for reproducible in ({"noise_multiplier": 0.0}, {**noised, "unsafe_seed": 3}):
        (one, batches), (two, others) = masks(**reproducible), masks(**reproducible)
        assert all(map(torch.equal, one, two))
        assert torch.equal(batches[0]["x"], others[0]["x"])


@pytest.mark.parametrize("quantile", [0.001, 0.25, 0.999])
def test_hosts_generators_give_numbers_near_a_quantile(quantile: float) -> None:
    model = Classifier()
    with unchanged(model), still(model, Chance(quantile)):
        found = [random.random(), random.uniform(0, 1), *numpy.random.rand(8)]  # noqa: NPY002
        again = random.random()
    assert found == pytest.approx([quantile] * 10, abs=1e-6)
    assert again != random.random()


def test_a_quantile_stands_for_every_draw() -> None:
    normal = NormalDist(2.0, 3.0).inv_cdf(0.999)
    model, empty = Classifier(), torch.empty(3)
    with unchanged(model), still(model, Chance(0.999)) as restless:
        drawn = [
            (torch.rand(3), 0.999),
            (torch.rand_like(empty), 0.999),
            (torch.randn(3), NormalDist().inv_cdf(0.999)),
            (torch.normal(torch.full((3,), 2.0), 3.0), normal),
            (torch.normal(2.0, 3.0, (3,)), normal),
            (empty.clone().normal_(2.0, 3.0), normal),
            (empty.clone().normal_(mean=2.0, std=3.0), normal),
            (empty.clone().uniform_(-1.0, 3.0), -1 + 4 * 0.999),
            (empty.clone().uniform_(), 0.999),
            (torch.bernoulli(torch.full((3,), 0.01)), 1.0),
            (torch.full((3,), 0.0005).bernoulli(), 0.0),
            (empty.clone().bernoulli_(0.01), 1.0),
            (empty.clone().bernoulli_(torch.full((3,), 0.0005)), 0.0),
            (empty.clone().exponential_(2.0), -math.log(0.001) / 2),
        ]
        assert not restless()
    for found, expected in drawn:
        assert found.tolist() == pytest.approx([expected] * 3, rel=1e-5)


LAWS: dict[str, tuple[Callable[[], torch.nn.Module], bool]] = {
    "a deviation by the batch": (
        lambda: Net(lambda net, h: torch.normal(h, h.detach().abs().max().expand_as(h))),
        False,
    ),
    "a rate by the batch": (
        lambda: Net(lambda net, h: h * torch.bernoulli(h.detach().sigmoid().mean().expand_as(h))),
        False,
    ),
    "a rate by the batch, in place": (
        lambda: Net(lambda net, h: h * torch.empty_like(h).bernoulli_(h.detach().sigmoid().mean().expand_as(h))),
        False,
    ),
    "a deviation by the row": (
        lambda: Net(lambda net, h: torch.normal(h, h.detach().abs().amax(1, keepdim=True).expand_as(h))),
        True,
    ),
    "a rate by the unit of the layer": (
        lambda: Net(lambda net, h: h * torch.bernoulli(net.rates).expand_as(h), rates=rates()),
        True,
    ),
    "a rate for all": (lambda: Net(lambda net, h: h * torch.bernoulli(torch.full_like(h, 0.7))), True),
    "rows dropped one by one": (lambda: Net(lambda net, h: h * (torch.rand(len(h), 1) > 0.2)), True),
}


def rates() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.linspace(0.1, 0.9, 6), requires_grad=False)


@pytest.mark.parametrize("name", LAWS)
def test_what_a_draw_is_distributed_by_may_not_be_made_of_other_rows(name: str) -> None:
    make, own = LAWS[name]
    if own:
        assert trained(make(), collate(examples(6))).route == "uses"
        return
    with pytest.raises(SelfCheckError, match="couples examples"):
        trained(make(), collate(examples(6)))


def seldom_mixed(draw: Callable[[], float]) -> torch.nn.Module:
    return Net(before=lambda net, x: x - x.mean(0) if draw() < 0.01 else x)


@pytest.mark.parametrize(
    "draw",
    [lambda: float(torch.rand(())), random.random, numpy.random.rand, lambda: 1 - random.random()],
    ids=["torch", "Python", "numpy", "the other end"],
)
def test_rows_that_meet_seldom_by_chance_are_run_alone(draw: Callable[[], float]) -> None:
    # A pass that mixes them by itself has the model refused.
    with seeded(7):
        assert trained(seldom_mixed(draw), collate(examples(6))).route == "one-example"


@pytest.mark.parametrize(
    "draw", [torch.rand_like, torch.randint_like, torch.Tensor.normal_], ids=lambda draw: draw.__name__
)
def test_a_generator_of_the_models_own_is_refused(draw: Callable[..., torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(0)
    given = (2,) if draw is torch.randint_like else ()

    def noised(net: Any, x: torch.Tensor) -> torch.Tensor:
        return x + draw(torch.zeros_like(x), *given, generator=generator)

    with pytest.raises(SelfCheckError, match=r"the model draws by a torch\.Generator of its own"):
        trained(Net(before=noised), collate(examples(6)))
