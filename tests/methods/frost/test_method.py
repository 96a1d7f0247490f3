"""DPFrost in `make_private`: what is selected, frozen, trained, accounted for and refused."""

import math

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp import accounting
from fastdp.methods.frost import DPFrost, split
from fastdp.methods.frost.accumulate import magnitude_bound
from fastdp.private.plan import Plan
from tests.cases import cases
from tests.engine.runs import CLASSES, FEATURES, collate, examples, logical_step

SETTINGS = {"unfreezing_ratio": 0.5, "selection_steps": 2, "selection_rate": 0.5, "selection_noise_multiplier": 0.0}


class Deep(nn.Module):
    """Four matrices, the last of which gets by far the largest gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        sizes = [FEATURES, 6, 6, 6, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in zip(sizes, sizes[1:]))
        self.scale = 100.0

    def forward(self, x, labels=None):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        logits = self.layers[-1](x * self.scale) / self.scale
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def start(model=None, method=None, data=None, optimizer=None, **options):
    model = Deep() if model is None else model
    method = DPFrost(**SETTINGS) if method is None else method
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loader = DataLoader(examples(24), batch_size=8, collate_fn=collate) if data is None else data
    if "target_epsilon" not in options:
        options = {"noise_multiplier": 0.0, **options}
    return fastdp.make_private(model, optimizer, loader, method=method, epochs=2, **{"unsafe_seed": 3, **options})


def held(optimizer):
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def trained(private):
    return {name for name, p in private.model.named_parameters() if p.requires_grad}


def test_selects_before_the_first_step_and_trains_nothing_else():
    model = Deep()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private = start(model)
    logical_step(private)
    chosen = private.method.chosen(before, private.outcome)
    assert "layers.3" in chosen
    names = {n for p in split(before) if p.name in chosen for n in p.parameters}
    assert trained(private) == names
    assert held(private.optimizer) == {id(p) for n, p in model.named_parameters() if n in names}
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == names
    assert sum(before[n].numel() for n in names) <= 0.5 * sum(p.numel() for p in before.values())
    private.detach()
    assert all(p.requires_grad for p in model.parameters())


def test_a_frozen_partition_keeps_no_activation_and_gets_no_gradient():
    """With only the last layer trained, autograd saves nothing of the layers below: their outputs need no gradient."""
    model = Deep()
    method = DPFrost(**{**SETTINGS, "unfreezing_ratio": 0.17, "selection_steps": 1})
    # A check of a batch asks for gradients of the inputs too.
    private = start(model, method, self_check=False)
    seen = []
    model.layers[2].register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    logical_step(private)
    assert trained(private) == {"layers.3.weight", "layers.3.bias"}
    seen.clear()
    logical_step(private)
    assert seen
    assert not any(seen)
    assert all(p.grad is None for p in model.layers[:3].parameters())


def test_the_selection_is_paid_for_before_training():
    method = DPFrost(unfreezing_ratio=0.5, selection_steps=3, selection_rate=0.1)
    private = start(method=method, target_epsilon=3.0, target_delta=1e-3, unsafe_seed=None)
    assert private.epsilon() == 0
    iterator = iter(private.data_loader)
    next(iterator)
    assert private.ledger.spent("selection") == private.ledger.budget("selection") == 3
    assert private.steps_done == 0
    selection = accounting.epsilon(private.ledger.event(), 1e-3)
    assert private.epsilon() == selection
    # ComputeSigma: training alone costs its share, and both together the whole.
    budget = private.ledger.budget_event()
    assert 2.99 < accounting.epsilon(budget, 1e-3) <= 3.0
    training = accounting.dpsgd(private.noise_multiplier, private.sample_rate, private.total_steps)
    assert accounting.epsilon(training, 1e-3) == pytest.approx(2.7, rel=1e-3)
    card = private.card()
    assert card["guarantee"] == "differential privacy"
    assert card["mechanism"]["name"] == "DP-FROST"


def test_the_paper_mode_states_what_its_epsilon_is_worth():
    method = DPFrost(unfreezing_ratio=0.5, selection_steps=3, selection_rate=0.1, mode="paper")
    private = start(method=method, target_epsilon=3.0, target_delta=1e-3)
    true = accounting.epsilon(private.ledger.budget_event(), 1e-3)
    assert true < 2.9
    assert accounting.epsilon(private.ledger.budget_event(), 1e-3, "rdp") == pytest.approx(3.0, rel=1e-3)
    note = private.card()["notes"][0]
    assert f"costs epsilon {true:.4f}, not the 3" in note
    given = DPFrost(**{**SETTINGS, "selection_noise_multiplier": 1.0}, mode="paper")
    private = start(method=given, noise_multiplier=1.0, target_delta=1e-3)
    assert not any("RDP" in note for note in private.card()["notes"])


@cases(("every", "epochs", "count"), [(None, 2, 1), (2, 2, 3), (6, 2, 1), (4, 2, 2)])
def test_repeated_selection_is_accounted_for_each_time(every, epochs, count):
    method = DPFrost(**SETTINGS, select_every=every)
    private = start(method=method)
    chosen = []
    for _ in range(epochs):
        for batch in private.data_loader:
            private.model(**batch)["loss"].backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            chosen.append(dict(private.outcome))
    assert private.steps_done == 6
    assert private.ledger.spent("selection") == 2 * count == private.ledger.budget("selection")
    assert len({id(o["iteration"]) for o in chosen}) == count


def test_a_resumed_run_keeps_its_selection(tmp_path):
    private = start(output_dir=tmp_path)
    logical_step(private)
    outcome = dict(private.outcome)
    private.detach()
    resumed = start(output_dir=tmp_path, resume=True)
    logical_step(resumed)
    assert torch.equal(resumed.outcome["iteration"], outcome["iteration"])
    assert resumed.ledger.spent("selection") == 2


def test_noise_of_the_stated_size_reaches_the_magnitudes():
    """Observed magnitudes less those without noise, in units of sensitivity: 400 normals, whose deviation lies within 15%
    of theirs in all but 3e-5 of runs (the seed is fixed).
    """
    parameters = {f"{i}.weight": nn.Parameter(torch.zeros(2)) for i in range(400)}
    model = nn.Module()
    model.params = nn.ParameterDict({str(i): p for i, p in enumerate(parameters.values())})
    model.forward = lambda x, labels: {"loss": _flat_loss(model, x, labels)}
    method = DPFrost(unfreezing_ratio=0.5, selection_steps=1, selection_rate=0.5, selection_noise_multiplier=3.0)
    private = start(model, method, noise_multiplier=1.0, self_check=False)
    next(iter(private.data_loader))
    observed = private.outcome["observed"][0] / magnitude_bound(split(parameters), method.max_grad_norm)
    # Equal gradients in all partitions: what differs between them is noise.
    assert float(observed.std()) == pytest.approx(3.0, rel=0.15)


def _flat_loss(model, x, labels):
    total = sum(p.sum() for p in model.parameters())
    return nn.functional.mse_loss(x.sum(1) * 0 + total, torch.ones(len(x)))


@cases(
    ("options", "message"),
    [
        ({"unfreezing_ratio": 0.0}, "unfreezing_ratio is 0.0"),
        ({"unfreezing_ratio": 1.0}, "unfreezing_ratio is 1.0"),
        ({"budget_ratio": 0.0}, "budget_ratio is 0.0"),
        ({"budget_ratio": 1.0}, "budget_ratio is 1.0"),
        ({"selection_steps": 0}, "selection_steps is 0"),
        ({"selection_rate": 0.0}, "selection_rate is 0.0"),
        ({"selection_rate": 1.5}, "selection_rate is 1.5"),
        ({"max_grad_norm": -1.0}, "max_grad_norm is -1.0"),
        ({"gap_coefficient": -1.0}, "gap_coefficient must be"),
        ({"select_every": 0}, "select_every"),
        ({"choose_by": "luck"}, "choose_by is 'luck'"),
        ({"mode": "printed"}, "mode is 'printed'"),
        ({"selection_noise_multiplier": math.nan}, "selection_noise_multiplier must be"),
    ],
)
def test_refuses_settings_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        DPFrost(**options)


BUDGET = {"target_epsilon": 3.0, "target_delta": 1e-3}


@cases(
    ("settings", "options", "message"),
    [
        ({"partitions": [["layers.0.*"], ["layers.*"]]}, {}, "layers.0.weight is listed twice"),
        ({"partitions": [["layers.0.*"]]}, {}, "do not cover the trained parameter layers.1.weight"),
        ({"partitions": [["layers.*"]]}, {}, "the smallest partition"),
        (
            {"selection_noise_multiplier": None},
            {"noise_multiplier": 1.0, "target_delta": 1e-3},
            "selection_noise_multiplier as well",
        ),
        ({}, BUDGET, "selection_noise_multiplier is 0"),
        ({}, {"loss_reduction": "mean"}, "give make_private criterion="),
        ({}, {"model": "outside"}, "on one example it raised KeyError: 'targets'"),
    ],
)
def test_refuses_before_anything_is_spent(settings, options, message, tmp_path):
    if "model" in options:
        options = {"model": Outside(), "criterion": lambda logits, batch: batch["targets"]}
    with pytest.raises(ValueError, match=message):
        start(method=DPFrost(**{**SETTINGS, **settings}), output_dir=tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_refuses_a_frozen_partition_given_back_to_the_optimizer():
    private = start()
    logical_step(private)
    frozen = next(p for p in private.model.parameters() if not p.requires_grad)
    private.optimizer.add_param_group({"params": [frozen]})
    with pytest.raises(ValueError, match="is frozen and stands in the optimizer's groups"):
        logical_step(private)


class Outside(Deep):
    def forward(self, x):
        logits = super().forward(x)["logits"]
        return logits


def _each(logits, batch):
    return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def test_a_criterion_selects_what_the_models_own_loss_does():
    within, outside = start(), start(Outside(), criterion=_each)
    steps = 0
    for private in (within, outside):
        for batch in private.data_loader:
            output = private.model(batch["x"]) if private is outside else private.model(**batch)
            (private.loss(output, batch) if private is outside else output["loss"]).backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            steps += private.last_step_done
    assert steps == within.total_steps  # one epoch of two, in each
    observed = [private.outcome["observed"] for private in (within, outside)]
    assert torch.allclose(*observed, equal_nan=True, rtol=1e-5)
    assert torch.equal(within.outcome["iteration"], outside.outcome["iteration"])


def test_given_noise_of_the_selection_leaves_the_rest_to_training():
    plan = Plan(1000, 50, 40, 20, "poisson", "add_remove", 2.0, 1e-4, None)
    budget = DPFrost(selection_steps=2, selection_rate=0.1, selection_noise_multiplier=4.0).budget(plan)
    event = accounting.compose(accounting.dpsgd(budget.noise_multiplier, 0.05, 40), accounting.dpsgd(4.0, 0.1, 2))
    assert 1.99 < accounting.epsilon(event, 1e-4) <= 2.0


def test_random_partitions_depend_on_the_seed_alone_and_cost_nothing():
    chosen = []
    for seed in (0, 0, 1, 2, 3):
        private = start(method=DPFrost(unfreezing_ratio=0.5, choose_by="random", seed=seed), **BUDGET)
        next(iter(private.data_loader))
        assert list(private.ledger.kinds) == ["step"]
        assert private.epsilon() == 0
        assert "reads no private data" in private.card()["notes"][0]
        chosen.append(trained(private))
    assert chosen[0] == chosen[1]
    assert len({frozenset(c) for c in chosen}) > 1
