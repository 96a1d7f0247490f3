"""What a method may do with private data besides training: a release cannot be had without its event, nor anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fastdp import accounting
from fastdp.accounting import BudgetExceeded, LedgerError
from fastdp.engine.clip.policy import Policy
from fastdp.engine.errors import SelfCheckError
from fastdp.private.method import Method
from fastdp.private.observer import Observer
from fastdp.private.plan import Budget, Plan, SideRelease
from fastdp.private.preparation import Findings, Outcome, Preparation
from tests.cases import cases
from tests.engine.runs import FEATURES, PRIVATE, Classifier, examples, loader, logical_step, start

RATE, NOISE, BOUND = 0.5, 2.0, 0.3
SUM = {"x": torch.zeros(FEATURES)}


def rows(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    yield {"x": batch["x"]}


@dataclass(frozen=True)
class Sneaky(Method):
    """Does as it is told in its preparation."""

    acts: Callable[[Any, Preparation], Any]
    concludes: Callable[[Any, Findings], Outcome] = lambda self, findings: {"x": torch.zeros(1)}
    admits: tuple[str, ...] = ()
    noise: float = NOISE
    mechanism: str = field(default="sneaky", init=False)

    def budget(self, plan: Plan) -> Budget:
        side = (SideRelease("rows", self.noise, RATE, 1),)
        return Budget(plan.multiplier(side), side)

    def prepares_at(self, step: int) -> bool:
        return step == 0

    def prepare(self, preparation: Preparation) -> None:
        return self.acts(self, preparation)

    def conclude(self, findings: Findings) -> Outcome:
        return self.concludes(self, findings)

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        return Policy((1.0,), (noise_multiplier,), dict.fromkeys(parameters, 0))

    def describe(self) -> dict[str, Any]:
        return {"name": self.mechanism}

    def flaws(self) -> tuple[str, ...]:
        return self.admits


def run(acts: Callable[[Any, Preparation], Any], **settings: Any) -> Any:
    """A run whose preparation has been made."""
    options = {key: settings.pop(key) for key in ("output_dir", "user_ids", "max_examples_per_user") if key in settings}
    private = start(Classifier(), method=Sneaky(acts, **settings), **options, **PRIVATE)
    private.prepare()
    return private


class Drawn(Observer):
    """Remembers the units that took part last, and the kind of each release."""

    def __init__(self) -> None:
        self.units: list[int] = []
        self.kinds: list[str] = []

    def drawn(self, units: list[int], kind: str) -> list[int]:
        self.units = units
        self.kinds.append(kind)
        return units


def test_a_method_has_no_way_to_the_data_but_a_release() -> None:
    """What used to be: sample everyone, record nothing, add no noise, and return the rows."""

    def leak(method: Any, preparation: Any) -> Any:
        return {"x": torch.cat([batch["x"] for batch, _ in preparation.sample(1.0)])}

    with pytest.raises(AttributeError, match="sample"):
        run(leak)
    for name in ("record", "sample", "stream", "open_loader", "differentiate"):
        assert not hasattr(Preparation, name)


def test_what_is_released_is_the_clipped_sum_of_the_units_drawn_with_the_noise_of_the_event() -> None:
    deviations, sizes = [], []
    seen: list[Any] = []
    method = Sneaky(lambda method, preparation: seen.append(preparation.release("rows").total(rows, BOUND, SUM)["x"]))
    for seed in range(16):
        private = start(method=method, unsafe_seed=seed, **PRIVATE)
        watch = Drawn()
        private.observe(watch)
        private.prepare()
        taken = [examples()[unit]["x"] for unit in watch.units]
        clipped = sum((x * min(1.0, BOUND / float(x.norm())) for x in taken), torch.zeros(FEATURES))
        deviations.append((seen[-1] - clipped) / (NOISE * BOUND))
        sizes.append(len(taken))
        assert private.ledger.spent("rows") == 1
        private.detach()
    # 80 squared normals: their mean has standard deviation .16. 16 binomials of 24 and 1/2: mean 12, deviation .6.
    assert 0.4 < float(torch.cat(deviations).square().mean()) < 1.8
    assert 9 < sum(sizes) / 16 < 15


def _returned(method: Any, preparation: Preparation) -> Any:
    kept: list[torch.Tensor] = []
    preparation.release("rows").total(lambda batch: (kept.append(batch["x"]), rows(batch))[1], BOUND, SUM)
    return {"x": torch.cat(kept)}


def _hidden(method: Any, preparation: Preparation) -> None:
    def spy(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        object.__setattr__(method, "hidden", batch["x"])
        return rows(batch)

    preparation.release("rows").total(spy, BOUND, SUM)
    assert method.hidden.shape[1] == FEATURES


def _written(method: Any, preparation: Preparation) -> None:
    def spy(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        preparation.parameters["first.weight"].detach()[0] = batch["x"][0]
        return rows(batch)

    preparation.release("rows").total(spy, BOUND, SUM)


def _of_one(*uses: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    """Use one release in several ways."""

    def act(method: Any, preparation: Any) -> None:
        sample = preparation.release("rows")
        for use in uses:
            use(sample)

    return act


def _draw(sample: Any) -> Any:
    return sample.total(rows, BOUND, SUM)


def _publish(sample: Any, value: float = 0.0, sensitivity: float = 1.0) -> Any:
    return sample.publish({"x": torch.full((3,), value)}, sensitivity)


def _double(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    yield {"x": batch["x"].repeat(2, 1)}


@cases(
    "acts, settings, kind, match",
    [
        (lambda m, p: p.release("other"), {}, ValueError, "no release of kind 'other' was declared"),
        (lambda m, p: [p.release("rows") for _ in range(2)], {}, BudgetExceeded, "'rows' are spent"),
        (_of_one(_draw, _draw), {}, RuntimeError, "has drawn its sample already"),
        (_of_one(_publish, _publish), {}, RuntimeError, "was made already"),
        (_of_one(_publish, _draw), {}, RuntimeError, "has drawn its sample already"),
        (_returned, {}, TypeError, "returned something from prepare"),
        (_hidden, {"concludes": lambda method, findings: {"x": method.hidden}}, AttributeError, "hidden"),
        (_written, {}, RuntimeError, "first.weight was changed outside of a release"),
        (_of_one(lambda sample: sample.total(_double, BOUND, SUM)), {}, ValueError, "one row a unit"),
        (
            _of_one(_draw),
            {"user_ids": [0, 0, 0, 0, *range(1, 21)], "max_examples_per_user": 4},
            ValueError,
            "one row a unit",
        ),
        (_of_one(lambda sample: _publish(sample, value=torch.nan)), {}, ValueError, "not finite"),
        (_of_one(lambda sample: _publish(sample, value=torch.inf)), {}, ValueError, "not finite"),
        (_of_one(lambda sample: _publish(sample, sensitivity=torch.inf)), {}, ValueError, "sensitivity"),
        (lambda m, p: p.unprotected(1.0, rows), {}, ValueError, "why it guarantees nothing"),
    ],
)
def test_what_a_preparation_may_not_do(acts: Any, settings: dict[str, Any], kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        run(acts, **settings)


def test_a_release_that_is_changed_after_its_noise() -> None:
    def overwrite(method: Any, preparation: Preparation) -> None:
        values = torch.zeros(4)
        released = preparation.release("rows").publish({"x": values}, 1.0)
        values.fill_(7.0)
        released["x"].fill_(7.0)

    private = run(overwrite, concludes=lambda method, findings: dict(findings.releases[0]))
    assert 0 < float(private.outcome["x"].std()) < 5 * NOISE
    assert not (private.outcome["x"] == 7.0).any()


def test_a_preparation_kept_for_later() -> None:
    kept: list[Any] = []
    run(lambda m, p: kept.extend([p, p.release("rows")]))
    for use in (
        lambda: kept[0].release("rows"),
        lambda: kept[0].unprotected(1.0, rows),
        lambda: kept[1].total(rows, BOUND, SUM),
        lambda: kept[1].publish({"x": torch.zeros(1)}, 1.0),
    ):
        with pytest.raises(RuntimeError, match="this preparation is over"):
            use()


@cases("weight", [2e-3, 0.0])
def test_a_contribution_that_others_change_is_not_released(weight: float) -> None:
    """By little beside ordinary records; by much in a first batch with one that is huge, or NaN."""
    data = [{"x": torch.full((FEATURES,), 1e3 if weight else torch.nan), "labels": 0}, *examples()]

    def centred(batch: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
        if len(batch["x"]) > 2:
            yield {"x": batch["x"] - weight * batch["x"].mean(0)}
        else:
            yield from rows(batch)

    def act(method: Any, preparation: Any) -> None:
        preparation.release("rows").total(centred, BOUND, SUM)

    def attempts() -> None:
        # Each sample holds the record with a chance of 1/2, and looks at another than that one mostly.
        for seed in range(8):
            start(Classifier(), loader(data), method=Sneaky(act), noise_multiplier=1.0, unsafe_seed=seed).prepare()

    with pytest.raises(SelfCheckError, match="one contributes otherwise alone"):
        attempts()


def test_what_is_read_without_noise_leaves_no_guarantee() -> None:
    def read(method: Any, preparation: Preparation) -> None:
        preparation.unprotected(1.0, rows)

    private = run(read, admits=("it reads rows as they are",), concludes=lambda m, f: dict(f.releases[0]))
    assert torch.allclose(private.outcome["x"], torch.stack([e["x"] for e in examples()]).sum(0), atol=1e-4)
    logical_step(private)
    assert private.epsilon() == float("inf"), "no epsilon is an upper bound for what guarantees nothing"
    card = private.card()
    assert card["guarantee"] == "none"
    assert "it reads rows as they are" in card["why_no_guarantee"]
    # As where the release that was declared has no noise.
    private = run(_of_one(_draw), noise=0.0)
    assert private.epsilon() == float("inf")
    assert private.card()["guarantee"] == "none"


def test_a_plan_draws_as_its_events_say() -> None:
    """The sampler has no rate of its own to be wrong about."""
    side = SideRelease("rows", NOISE, 0.25, 3)
    for sampling, adjacency in (("poisson", "add_remove"), ("shuffled", "zero_out"), ("shuffled", "replace_one")):
        plan = Plan(40, 10, 8, 4, sampling, adjacency, None, 1e-3, 1.0, side=(side,))  # type: ignore[arg-type]
        stream = start().data_loader.sampler.stream
        step = plan.event().event(4)
        if sampling == "poisson":
            assert step == accounting.dpsgd(1.0, plan.sampler(stream).sample_rate, 4)
        else:
            batches = list(plan.sampler(stream).epoch(4))
            assert sorted(unit for batch in batches for unit in batch) == list(range(40))
            assert step == accounting.gaussian(1.0)
        rate = plan.sampler(stream, "rows").sample_rate
        assert plan.event("rows").event(1) == accounting.poisson_gaussian(NOISE, rate)
        with pytest.raises(ValueError, match="no release of kind"):
            plan.sampler(stream, "other")


def test_shuffled_batches_claim_nothing_about_a_unit_more_or_less() -> None:
    with pytest.raises(ValueError, match="hold nothing for adjacency='add_remove'"):
        start(sampling="shuffled", adjacency="add_remove", **PRIVATE)
    private = start(sampling="shuffled", **PRIVATE)
    card = private.card()
    assert card["adjacency"] == "zero_out"
    assert any("leaves its place in the order empty" in line for line in card["assumptions"])
    assert accounting.verify(card)
    for event in (accounting.dpsgd(1.0, 0.1, 30), accounting.gaussian(2.0)):
        costs = [float(accounting.epsilon(event, 1e-4, adjacency=kind)) for kind in ("zero_out", "add_remove")]  # type: ignore[arg-type]
        assert costs[0] == costs[1], "an empty place is a unit less, in the same batch"


def test_the_card_tells_of_observers() -> None:
    private = start(**PRIVATE)
    assert not any("looked on" in line for line in private.card()["unprotected"])
    watch = Drawn()
    private.observe(watch)
    with pytest.raises(ValueError, match="looks on already"):
        private.observe(watch)
    private.unobserve(watch)
    assert any("Drawn" in line for line in private.card()["unprotected"])


def test_an_edited_outcome_is_refused(tmp_path: Any) -> None:
    from safetensors.torch import load_file, save_file

    def begin(**options: Any) -> Any:
        method = Sneaky(
            lambda m, p: p.release("rows").total(rows, BOUND, SUM) and None, lambda m, f: dict(f.releases[0])
        )
        return start(method=method, noise_multiplier=1.0, target_delta=1e-3, output_dir=tmp_path, **options)

    first = begin()
    first.prepare()
    state = first.state_dict()
    first.detach()
    (path,) = tmp_path.glob("preparation-*")
    kept = load_file(path)
    save_file({"x": kept["x"] + 1}, path)
    second = begin(resume=True)
    with pytest.raises(LedgerError, match="was edited, or is another run's"):
        second.prepare()
    with pytest.raises(LedgerError, match="the checkpoint's outcome"):
        second.load_state_dict({**state, "outcome": {"x": kept["x"] + 1}})
    save_file(kept, path)
    second.prepare()
    assert torch.equal(second.outcome["x"], kept["x"])
    assert second.ledger.spent("rows") == 1
    second.detach()
