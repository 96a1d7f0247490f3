"""Mistakes seen in real systems, each with a test that fails when it is made again.

Where it can be done, the mistake itself is put into the engine and the check has to notice it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dp_accounting.dp_event import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from torch import nn

import fastdp
from fastdp.accounting import Ledger
from fastdp.engine import norms
from fastdp.engine.accumulator import Accumulator
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.losses import LossTerms
from fastdp.engine.policy import Policy
from fastdp.engine.routing import Routing
from fastdp.ops.noise import standard_normals
from fastdp.private.sampler import ShuffledSampler
from tests.cases import cases
from tests.engine.models import batch as model_batch, build
from tests.engine.reference import Recording, engine_for, norms as sizes, ticket
from tests.engine.runs import (
    CLIPPED,
    EXACT,
    Classifier,
    clipped_sum,
    error,
    examples,
    join,
    loader,
    logical_step,
    one_by_one,
    opaque,
    same,
    start,
)
from tests.noise import Add, replace_noise


def notices(check: Callable[[], None], *errors: type[BaseException]) -> None:
    """Assert that a check fails now that the fault is in."""
    with pytest.raises((AssertionError, *errors)):
        check()


class Tied(nn.Module):
    """A next-token model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(torch.tanh(self.middle(self.table(ids))))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def _ids(rows: int = 4, tokens: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 11, (rows, tokens), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, 2:] = -100
    labels[1, :3] = -100
    return {"ids": ids, "labels": labels}


def _norms(model: nn.Module, data: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    engine, tickets = engine_for(model, 1.0, **options)
    tickets.append(ticket(len(data["labels"])))
    model(**data)["loss"].backward()
    engine.close()
    return Recording.seen[-1][0] if engine.route == "uses" else torch.stack([n[0, 0] for n in Recording.seen])


def _exact_step(model: nn.Module | None = None, steps: int = 1, **options: Any) -> None:
    """Assert that each step's gradient is the clipped sum of that batch alone, over the expected batch size."""
    private = start(model, method=fastdp.DPSGD(max_grad_norm=0.5), **options)
    iterator = iter(private.data_loader)
    for _ in range(steps):
        got, batches = logical_step(private, iterator)
        expected = clipped_sum(one_by_one(private.model, join(batches)), 0.5)
        assert error(got, {n: t / 8 for n, t in expected.items()}) < CLIPPED


def test_trap_01_tied_weights_are_summed_before_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = Tied(), _ids()
    truth = sizes(one_by_one(model, data))

    def check(**options: Any) -> None:
        assert torch.allclose(_norms(model, data, **options).double(), truth, rtol=EXACT)

    check()

    def without_cross_terms(sink: Any, name: str, entry: Any) -> None:
        for use in entry.factors:
            offsets = sink.layout.offsets(use.right.shape[0], laned=use.laned)
            sink.add_powers(name, norms.ops.sqnorm(use.left, use.right, offsets), norms.ops.Rounding(use.right))

    monkeypatch.setattr(norms.NormSink, "_several", without_cross_terms)
    notices(lambda: check(verify=Routing))
    # A rule that fails its check gives way to the route that needs none.
    with pytest.warns(UserWarning, match="no rule fits how .* is read"):
        check()


def test_trap_02_every_backward_before_a_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        _exact_step(max_physical_batch_size=2)

    check()
    private = start()
    private.data_loader.look_ahead = True
    first, second = [batch for batch, _ in zip(private.data_loader, range(2))]
    private.model(**first)["loss"].backward()
    with pytest.raises(RuntimeError, match=r"optimizer.step\(\) has not been called"):
        private.model(**second)["loss"].backward()

    add = Accumulator.add_instances

    def assign(accumulator: Any, instances: Any, factors: torch.Tensor) -> None:
        for name in instances:
            accumulator.sums.pop(name, None)
        add(accumulator, instances, factors)

    monkeypatch.setattr(Accumulator, "add_instances", assign)
    notices(check)


def test_trap_03_a_nan_example_reaches_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    data = examples(8)
    data[5]["x"][2] = math.nan

    def check() -> None:
        private = start(data_loader=loader(data), self_check=False)
        got, batches = logical_step(private)
        finite = [g for g in one_by_one(private.model, join(batches)) if all(v.isfinite().all() for v in g.values())]
        assert len(finite) == 7
        assert private.nonfinite_examples == 1
        assert error(got, {n: t / 8 for n, t in clipped_sum(finite, 1.0).items()}) < CLIPPED

    check()
    # 0 times NaN is NaN: a weight of 0 alone does not take an example out.
    monkeypatch.setattr(Policy, "scales", lambda self, upper: (self.bounds[0] / upper.norms).clamp(max=1.0).float())
    notices(check)


def test_trap_05_the_accountant_describes_the_sampler_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(sampling: str) -> None:
        private = start(noise_multiplier=1.0, target_delta=1e-4, sampling=sampling)
        iterator = iter(private.data_loader)
        for _ in range(4):
            logical_step(private, iterator if private.steps_done < 3 else None)
        event = private.ledger.event()
        sampler = private.data_loader.sampler
        if isinstance(sampler, ShuffledSampler):
            # Four of three steps an epoch: two epochs begun, each one Gaussian release over all units.
            assert event == SelfComposedDpEvent(GaussianDpEvent(1.0), 2)
        else:
            assert event == SelfComposedDpEvent(PoissonSampledDpEvent(sampler.sample_rate, GaussianDpEvent(1.0)), 4)

    check("poisson")
    check("shuffled")
    with pytest.raises(ValueError, match="WeightedRandomSampler would be replaced"):
        start(data_loader=loader(sampler=torch.utils.data.WeightedRandomSampler([1.0] * 24, 24)))

    always_amplified = fastdp.accounting.dpsgd_model
    monkeypatch.setattr(fastdp.accounting, "dpsgd_model", lambda sigma, rate, *_: always_amplified(sigma, rate))
    notices(lambda: check("shuffled"))


def test_trap_07_noise_is_added_once_however_the_work_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[float] = []

    def counting(total: torch.Tensor, std: float, add: Add) -> None:
        draws.append(std)
        add(total, std)

    replace_noise(monkeypatch, counting)
    for physical in (None, 1, 3):
        draws.clear()
        private = start(noise_multiplier=2.0, max_physical_batch_size=physical, method=fastdp.DPSGD(max_grad_norm=0.5))
        logical_step(private)
        assert draws == [1.0] * 4, "sigma C, once for each of four parameters"
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        bare, _ = logical_step(start(Classifier(), noise_multiplier=1.0))
        # Of a wrapper the model is taken, and the wrapper exchanges nothing from then on.
        wrapped, _ = logical_step(start(nn.parallel.DistributedDataParallel(Classifier()), noise_multiplier=1.0))
        assert same(bare, wrapped)
    finally:
        torch.distributed.destroy_process_group()


def test_trap_08_noise_is_drawn_in_float32_for_bf16_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    std, seed = 1e6, 3

    def check() -> None:
        model = Classifier().bfloat16()
        data = [{**e, "x": e["x"].bfloat16()} for e in examples()]
        # On a grid the noise would differ from the normals by more than bf16's rounding.
        options = {"noise_multiplier": std, "unsafe_seed": seed, "secure_rounding": False}
        got, _ = logical_step(start(model, loader(data), **options))
        stream = fastdp.NoiseStream.unsafe_reproducible(2 * seed)
        for index, (name, gradient) in enumerate(got.items()):
            noise = std / 8 * standard_normals(stream.at(0, index).take(), gradient.numel()).view(gradient.shape)
            assert gradient.dtype == torch.bfloat16
            # Half a unit in the last of bf16's 8 bits, at most 2^-8; the clipped sum over 8 and float32's rounding are below 4.
            assert bool(((gradient.double() - noise).abs() <= noise.abs() * 2**-8 + 4).all()), name

    check()

    def in_bf16(total: torch.Tensor, std: float, add: Add) -> None:
        noise = torch.zeros_like(total, dtype=torch.bfloat16)
        add(noise, 1.0)
        total.add_(noise.float() * std)

    replace_noise(monkeypatch, in_bf16)
    notices(check)


def test_trap_10_accumulators_start_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        _exact_step(steps=3, max_physical_batch_size=3)

    check()
    private = start(method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=2)
    private.model(**next(iter(private.data_loader)))["loss"].backward()  # begun, and left
    got, batches = logical_step(private)
    expected = clipped_sum(one_by_one(private.model, join(batches)), 0.5)
    assert error(got, {n: t / 8 for n, t in expected.items()}) < CLIPPED

    reset = Accumulator.reset
    monkeypatch.setattr(Accumulator, "reset", lambda self: None if hasattr(self, "sums") else reset(self))
    # Release empties the sums it takes, so only what the preparation left behind shows, and the abandoned batch.
    private = start(method=fastdp.DPSGD(max_grad_norm=0.5), max_physical_batch_size=2)
    private.model(**next(iter(private.data_loader)))["loss"].backward()
    got, batches = logical_step(private)
    expected = clipped_sum(one_by_one(private.model, join(batches)), 0.5)
    assert error(got, {n: t / 8 for n, t in expected.items()}) > 1e-2


def test_trap_11_no_example_s_loss_depends_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _ids()

    def check(**options: Any) -> None:
        among = _norms(Tied(), data, **options)
        for keep in ([0, 1], [1, 3], [2]):
            alone = _norms(Tied(), {k: v[keep] for k, v in data.items()}, **options)
            assert torch.allclose(alone, among[keep], rtol=EXACT)

    check()
    model = build("gpt2")
    texts = model_batch("gpt2")
    engine, tickets = engine_for(model, 1.0)
    for rows in (4, 2):
        tickets.append(ticket(rows, last=False))
        model(**{k: v[:rows] for k, v in texts.items()}).loss.backward()
    assert torch.allclose(Recording.seen[-2][0][:2], Recording.seen[-1][0], rtol=EXACT)

    def token_mean(terms: LossTerms, losses: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return losses.view(terms.layout.rows, -1).sum(1) * terms.layout.rows / valid.sum()

    monkeypatch.setattr(LossTerms, "_means", token_mean)
    notices(lambda: check(verify=Routing))
    notices(check, SelfCheckError)


def test_trap_12_a_resumed_run_remembers_what_it_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> None:
        options: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-4}
        before = start(**options)
        for _ in range(2):
            logical_step(before)
        after = start(**options)
        after.load_state_dict(before.state_dict())
        assert after.steps_done == 2
        assert after.epsilon() == before.epsilon() > 0
        left = 0
        for _ in range(2):
            left += sum(logical_step_in(after, batch) for batch in after.data_loader)
        assert left == 4, "two of six steps were spent before"

    def logical_step_in(private: Any, batch: Any) -> int:
        private.model(**batch)["loss"].backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
        return int(private.last_step_done)

    check()
    monkeypatch.setattr(Ledger, "restore", lambda self, steps, head=None: None)
    notices(check)


@cases("two_pass", [False, True])
def test_trap_12_ignored_labels_mean_the_same_on_every_route(two_pass: bool) -> None:
    data = _ids()
    data["labels"][2] = -100  # an example without labels has loss 0

    class OddTied(Tied):
        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
            hidden = torch.tanh(opaque(F.linear, self.table(ids), self.middle.weight) + self.middle.bias)
            logits = self.head(hidden)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
            return {"loss": loss / (labels[:, 1:] != -100).sum().clamp(min=1)}

    truth = sizes(one_by_one(OddTied(), data))
    assert float(truth[2]) == 0
    assert torch.allclose(_norms(Tied(), data, two_pass=two_pass).double(), truth, rtol=EXACT)
    with pytest.warns(UserWarning, match="one-example route"):
        by_rows = _norms(OddTied(), data)
    assert torch.allclose(by_rows.double(), truth, rtol=EXACT)


def test_trap_13_a_saved_adapter_loads_in_plain_peft(tmp_path: Any) -> None:
    import peft

    model = build("gpt2", "lora")
    before = list(model.state_dict())
    data = model_batch("gpt2")
    engine, tickets = engine_for(model, 1.0)
    tickets.append(ticket(4))
    model(**data).loss.backward()
    assert list(model.state_dict()) == before
    model.save_pretrained(tmp_path)
    plain = build("gpt2")
    base = {n: t for n, t in model.state_dict().items() if "lora_" not in n}
    plain.load_state_dict({n.removeprefix("base_model.model.").replace(".base_layer", ""): t for n, t in base.items()})
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    with torch.no_grad():
        assert torch.equal(model.eval()(**data).logits, loaded.eval()(**data).logits)
