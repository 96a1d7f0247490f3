"""What is refused: each in one clear sentence, with nothing lost and no budget spent."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from transformers import DataCollatorWithFlattening

import fastdp
from fastdp.private.sampler import PoissonSampler
from tests.cases import cases
from tests.engine.models import build
from tests.engine.runs import CLASSES, FEATURES, Classifier, examples, loader, logical_step, same, start, state

PRIVATE = {"noise_multiplier": 1.0, "target_delta": 1e-4}


def readable(error: BaseException) -> None:
    """Assert that a message is one line of readable length: what happened, and what to do."""
    text = str(error)
    assert 20 < len(text) < 350, text
    assert "\n" not in text
    assert len(re.findall(r"[.!?] +[A-Z]", text)) < 3, f"more than three sentences: {text}"


@contextmanager
def refused(
    kind: type[BaseException], match: str, private: Any = None, model: nn.Module | None = None
) -> Iterator[None]:
    """The block raises ``kind`` in one sentence; model, budget and optimizer are as they were before it."""
    model = private.model if private is not None else model
    before = None if model is None else state(model)
    spent = None if private is None else (private.steps_done, private.epsilon())
    with pytest.raises(kind, match=match) as caught:
        yield
    readable(caught.value)
    if model is not None:
        assert before is not None
        assert same(state(model), before)
    if private is not None:
        assert (private.steps_done, private.epsilon()) == spent


def test_refusals_before_the_start_leave_everything_as_it_was(tmp_path: Path) -> None:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(ValueError, "target_epsilon is -1.0", model=model):
        start(model, optimizer=optimizer, target_epsilon=-1.0, target_delta=1e-4, output_dir=tmp_path / "run")
    assert "forward" not in model.__dict__
    assert not optimizer._optimizer_step_pre_hooks
    assert not (tmp_path / "run").exists()
    start(model, optimizer=optimizer)


@cases(
    "options, match",
    [
        ({"target_epsilon": 0.0, "target_delta": 1e-4}, "target_epsilon is 0.0"),
        ({"target_epsilon": 8.0}, "needs target_delta"),
        ({"target_epsilon": 8.0, "target_delta": math.nan}, "target_delta is nan"),
        ({"target_epsilon": 1e-7, "target_delta": 1e-10, "epochs": 1000}, "out of reach"),
        ({"target_epsilon": 8.0, "target_delta": 1e-4, "noise_multiplier": 1.0}, "either target_epsilon or"),
        ({"noise_multiplier": None}, "either target_epsilon or"),
        ({"noise_multiplier": math.inf}, "noise_multiplier is inf"),
        ({"epochs": None}, "epochs is None"),
        ({"epochs": math.inf}, "epochs is inf"),
        ({"sampling": "weighted"}, "sampling is 'weighted'"),
        ({"adjacency": "neighbouring"}, "adjacency is 'neighbouring'"),
        ({"adjacency": ""}, "adjacency is ''"),
        ({"loss_reduction": "none"}, "loss_reduction is 'none'"),
        ({"user_ids": [0, 1]}, "2 entries for 24 examples"),
        ({"user_ids": list(range(24))}, "state max_examples_per_user"),
        ({"user_ids": [i // 6 for i in range(24)], "max_examples_per_user": 6}, "batch_size 8 exceeds the 4 units"),
        (
            {"user_ids": [i // 3 for i in range(24)], "max_examples_per_user": 3, "max_physical_batch_size": 2},
            "up to 3 rows but max_physical_batch_size is 2",
        ),
        (
            {"user_ids": [i // 2 for i in range(24)], "max_examples_per_user": 2, "max_physical_batch_size": 2}
            | {"shapes": "public"},
            "up to 3 rows but max_physical_batch_size is 2",
        ),
        (
            {"method": fastdp.NonPrivate(), "target_epsilon": 8.0, "target_delta": 1e-4},
            "cannot meet target_epsilon 8.0",
        ),
        (
            {"method": fastdp.DPSGD(1e300), "noise_multiplier": 1.0},
            "max_grad_norm 1e.300 times the noise multiplier 1 is",
        ),
        (
            {"method": fastdp.DPSGD(1e-29), "noise_multiplier": 1e-3},
            "max_grad_norm 1e-29 times .* choose a bound nearer",
        ),
        ({"method": fastdp.DPSGD(groups={"only": ["first.*"]})}, "no group's pattern matches .*'second.weight'"),
        ({"method": fastdp.DPSGD({"a": 1.0}, groups={"a": ["first.*"], "b": ["*"]})}, "no entry for the group 'b'"),
        ({"unsafe_seed": -1}, "unsafe_seed is -1: give a whole number of at least 0"),
        ({"shapes": [0]}, "shapes has the lengths .*above 1"),
        ({"isolation": "per_row"}, "isolation is 'per_row': use 'per_example'"),
        ({"isolation": True}, "isolation is True: use 'per_example'"),
        ({"isolation": "per_example", "unit_map": "units"}, "leave unit_map and capture out"),
        ({"noise_rounds": 8}, "noise_rounds is 8: noise has 20 rounds of ChaCha, or 12"),
        ({"noise_rounds": "12"}, "noise_rounds is '12'"),
        (
            {"shapes": "public", "unit_map": "units"},
            "whose lengths decide each other's places. Leave shapes or unit_map",
        ),
        ({"capture": True}, "capture records CUDA graphs"),
        ({"capture": True, "keep_logits": False}, "capture records the logits as a whole"),
        ({"capture": True, "two_pass": True}, "capture records one backward pass"),
        ({"capture": "always"}, "capture is 'always': use 'auto', True or False"),
        (
            {"method": fastdp.DPSGD(adaptive=fastdp.AdaptiveClipping(count_noise_std=0.4)), "noise_multiplier": 1.0},
            "leaves nothing for the gradient",
        ),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], match: str) -> None:
    model = Classifier()
    with refused(ValueError, match, model=model):
        start(model, **options)
    assert "forward" not in model.__dict__


@cases("name", ["resume", "secure_rounding", "two_pass", "self_check", "keep_logits", "allow_large_delta", "user_ids"])
def test_switches_and_lists_of_another_type(name: str) -> None:
    value = 5.0 if name == "user_ids" else "no"
    with refused(TypeError, f"^{name} is of type .*: give"):
        start(Classifier(), **{name: value}, max_examples_per_user=1)


@cases(
    "make, match",
    [
        (lambda: fastdp.DPSGD(groups=["*"]), "groups is .*: give 'per_layer' or a mapping"),  # type: ignore[arg-type]
        (lambda: fastdp.DPSGD(groups=3), "groups is 3: give"),  # type: ignore[arg-type]
        (lambda: fastdp.DPSGD(noise_schedule={0: "a"}), "factor of noise_schedule at step 0 is 'a'"),  # type: ignore[dict-item]
        (lambda: fastdp.RapFT(irrelevance_ratio="a"), "irrelevance_ratio is 'a': give a number"),  # type: ignore[arg-type]
        (lambda: fastdp.RapFT(irrelevance_ratio=None), "irrelevance_ratio is None: it must be"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_a_method_of_another_type(make: Callable[[], Any], match: str) -> None:
    with refused(ValueError, match):
        make()


@cases(
    "make, kind, match",
    [
        (lambda: [1, 2], TypeError, "give a torch.utils.data.DataLoader"),
        (lambda: loader(batch_size=25), ValueError, "sample rate would pass 1"),
        (lambda: DataLoader([], batch_size=8), ValueError, "empty"),
        (lambda: DataLoader(examples(), batch_size=None), ValueError, "give it batch_size"),
        (lambda: loader(sampler=RandomSampler(range(24), replacement=True)), ValueError, "with replacement"),
        (
            lambda: loader(sampler=torch.utils.data.DistributedSampler(range(24), 2, 0)),  # type: ignore[arg-type]
            ValueError,
            "DistributedSampler would be replaced",
        ),
    ],
)
def test_loaders_that_cannot_be_sampled(make: Callable[[], Any], kind: type[Exception], match: str) -> None:
    with refused(kind, match):
        start(data_loader=make())


@cases("way", ["eva", "corda", "lora_ga"])
def test_adapters_made_of_examples_that_nobody_said_were_public(way: str) -> None:
    model = peft.get_peft_model(build("gpt2"), peft.LoraConfig(r=2, fan_in_fan_out=True))
    model.peft_config["default"].init_lora_weights = way
    with refused(ValueError, f"'{way}' makes adapter 'default' of examples", model=model):
        start(nn.ModuleDict({"inner": model}), **PRIVATE)
    model.peft_config["default"].init_lora_weights = True
    start(model, **PRIVATE).detach()


def _with(module: nn.Module) -> nn.Module:
    model = Classifier()
    model.add_module("extra", module)
    return model


def _quantised() -> nn.Module:
    model = Classifier()
    # As bitsandbytes marks a weight that is packed into numbers of another kind.
    model.second.weight.quant_state = object()  # type: ignore[attr-defined]
    return model


def _balanced() -> nn.Module:
    model = Classifier()
    model.config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.1)  # type: ignore[assignment]
    return model


def _nothing_trained() -> None:
    start(Classifier().requires_grad_(False), optimizer=torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1))


def _several_times_a_step() -> None:
    model = Classifier()
    start(model, optimizer=torch.optim.LBFGS(model.parameters()), **PRIVATE)


def _on_two_devices() -> nn.Module:
    model = nn.DataParallel(Classifier())
    model.device_ids = [0, 1]
    return model


def _lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.Linear(4, 3))
    start(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_reduction="mean", **PRIVATE)


@cases(
    "attempt, match",
    [
        (lambda: start(_with(nn.BatchNorm1d(3))), "extra is a batch normalisation"),
        (lambda: start(_with(nn.Embedding(3, 2, max_norm=1.0))), "extra has max_norm"),
        (lambda: start(_on_two_devices()), "bare model"),
        (lambda: start(_with(type("AdaLoraLayer", (nn.Linear,), {})(3, 3))), "AdaLoRA chooses its ranks by gradients"),
        (lambda: start(_balanced()), "output_router_logits = False"),
        (lambda: start(_quantised()), "second.weight is quantised"),
        (lambda: start(Classifier().to(torch.cfloat)), "first.weight is complex.*view_as_complex"),
        (lambda: PoissonSampler(4, 1.5, fastdp.NoiseStream()), "sample rate 1.5 is outside"),
        (_lazy, "0.weight is not initialized yet"),
        (_nothing_trained, "no trained parameter"),
        (_several_times_a_step, "LBFGS differentiates several times"),
        (
            lambda: fastdp.optim.AdamW(Classifier().requires_grad_(False), loader(), epochs=1, noise_multiplier=1.0),
            "no trained parameter",
        ),
        (lambda: start(unit_map="units", loss_reduction="mean", **PRIVATE), "cannot be tried on packed rows"),
        (lambda: start(unit_map="units", criterion=lambda o, b: o, **PRIVATE), "cannot be tried on packed rows"),
        (lambda: start(noise_multiplier=1.0, target_delta=0.1), "not below 1/N"),
        (lambda: start(output_dir=Path(__file__), **PRIVATE), "the ledger cannot be kept in .*give an output_dir"),
    ],
)
def test_models_and_runs_that_cannot_be_private(attempt: Callable[[], Any], match: str) -> None:
    with refused(ValueError, match):
        attempt()


class Silent(Classifier):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.logits(x)
        return {"logits": logits, "scale": logits.sum().detach()}


def _hand_out(private: Any) -> Any:
    return next(iter(private.data_loader))


def _loss(private: Any) -> torch.Tensor:
    found: torch.Tensor = private.model(**_hand_out(private))["loss"]
    return found


def _again(private: Any) -> None:
    loss = _loss(private)
    loss.backward(retain_graph=True)
    loss.backward()


def _two_forward_passes(private: Any, join: Callable[[Any, Any], torch.Tensor]) -> None:
    batch = _hand_out(private)
    join(private.model(**batch), private.model(**batch)).backward()


def _one_of_two(one: Any, two: Any) -> torch.Tensor:
    one["loss"].backward()
    return two["loss"]  # type: ignore[no-any-return]


def _in_parts(private: Any) -> None:
    batch = _hand_out(private)
    hidden = torch.tanh(private.model.first(batch["x"]))
    F.cross_entropy(private.model.second(hidden), batch["labels"]).backward()
    private.optimizer.step()


def _ahead(private: Any) -> None:
    iterator = iter(private.data_loader)
    next(iterator), next(iterator)


def _after_backward(private: Any) -> None:
    """As sharpness-aware minimization, adversarial weights and the discriminator of a GAN do."""
    batch = _hand_out(private)
    private.model(**batch)["loss"].backward()
    private.model(**batch)


def _with_gradients(private: Any) -> None:
    batch = _hand_out(private)
    private.model(batch["x"].requires_grad_(), batch["labels"])


def _called_with(private: Any, rows: int) -> Any:
    return private.model(torch.zeros(rows, FEATURES), torch.zeros(rows, dtype=torch.int64))


def _mean(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output["logits"], batch["labels"])


def _by_criterion(private: Any) -> None:
    batch = _hand_out(private)
    private.loss(private.model(**batch), batch)


OUTSIDE, PIECES = {"loss_reduction": "mean"}, {"max_physical_batch_size": 2}
NO_BACKWARD = r"step\(\) without backward\(\)"


@cases(
    "model, options, act, kind, match",
    [
        (Classifier, {}, lambda p: p.optimizer.step(), RuntimeError, NO_BACKWARD),
        (Classifier, {}, lambda p: p.optimizer.step(lambda: torch.zeros(())), RuntimeError, NO_BACKWARD),
        (Classifier, PIECES, _again, RuntimeError, r"second backward\(\) ran on one batch"),
        (
            Classifier,
            PIECES,
            lambda p: _two_forward_passes(p, _one_of_two),
            RuntimeError,
            "Two forward passes ran before one backward",
        ),
        (Classifier, OUTSIDE, _in_parts, RuntimeError, r"The loop called parts of the model, .* own forward\(\)"),
        (Classifier, PIECES, _ahead, RuntimeError, "taken ahead"),
        (Classifier, {}, _after_backward, RuntimeError, r"after its batch's backward\(\).*; replace SAM"),
        (Classifier, {}, _with_gradients, ValueError, r"An input requires gradients.* model.eval\(\)"),
        (
            Classifier,
            {},
            lambda p: _called_with(p, 2)["loss"].backward(),
            RuntimeError,
            "not private.data_loader's next: .* before one backward",
        ),
        (
            Classifier,
            {},
            lambda p: (_hand_out(p), _called_with(p, 23)),
            ValueError,
            "handed out .* rows but the model was called with 23: .* once, and concatenate inside a wrapper module",
        ),
        (Classifier, {}, lambda p: (-_loss(p)).backward(), ValueError, "must be positive"),
        (Silent, {"criterion": _mean}, _by_criterion, ValueError, "Return one loss per row"),
        (Silent, {}, _loss, ValueError, "returned no loss of what is trained: .* make_private criterion="),
    ],
)
def test_loops_that_cannot_be_followed(
    model: Callable[[], nn.Module], options: dict[str, Any], act: Callable[[Any], Any], kind: Any, match: str
) -> None:
    private = start(model(), **options, **PRIVATE)
    with refused(kind, match, private):
        act(private)


def test_a_unit_map_that_is_missing_or_names_a_stranger() -> None:
    private = start(unit_map="units", **PRIVATE)
    with refused(ValueError, "unit_map is 'units', and the collator puts no such entry", private):
        next(iter(private.data_loader))

    def strangers(items: Any) -> Any:
        return {"x": torch.zeros(1, 3, FEATURES), "units": torch.tensor([[0, 1, 99]])}

    private = start(data_loader=loader(collate_fn=strangers), unit_map="units", **PRIVATE)
    with refused(ValueError, "names unit 99", private):
        next(iter(private.data_loader))

    def split(items: Any) -> Any:
        labels = torch.zeros(1, 3, dtype=torch.int64)
        return {"x": torch.zeros(1, 3, FEATURES), "labels": labels, "units": torch.tensor([[0, 1, 0]])}

    # That its collator gives an example other tokens beside others would be found first.
    private = start(data_loader=loader(collate_fn=split), unit_map="units", self_check=False, **PRIVATE)
    batch = next(iter(private.data_loader))
    with refused(ValueError, "one contiguous run", private):
        private.model(**batch)


@cases("told, way", [(True, "$"), (False, " Make the collator with return_seq_idx=True")])
def test_packed_rows_without_a_map(told: bool, way: str) -> None:
    rows = [{"input_ids": list(range(3, 5 + number % 5))} for number in range(24)]
    data = loader(rows, collate_fn=DataCollatorWithFlattening(return_seq_idx=told))
    private = start(build("llama"), data, **PRIVATE)
    message = rf"packs examples into one row. Pass unit_map='seq_idx' and set use_cache=False\.{way}"
    with refused(ValueError, message, private):
        private.model(**next(iter(private.data_loader)))


def test_gradients_that_were_not_clipped() -> None:
    private = start(max_physical_batch_size=2, **PRIVATE)
    weight = private.model.first.weight
    for put in (lambda: setattr(weight, "grad", torch.ones_like(weight)), lambda: weight.square().sum().backward()):
        private.model(**next(iter(private.data_loader)))["loss"].backward()
        put()
        with refused(RuntimeError, r"first\.weight holds an unclipped gradient at step\(\)", private):
            private.optimizer.step()
        assert weight.grad is None


class Large(Classifier):
    """Fills the device in one of its passes."""

    when = ""

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        def fill(_: torch.Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

        hidden = self.first(x)
        if self.when == "forward":
            fill(x)
        if self.when == "backward":
            hidden.register_hook(fill)
        return self.second(torch.tanh(hidden))


@cases(
    "rows, when, said",
    [
        (1, "forward", "too little memory for 1 row. Shorten"),
        (4, "backward", "for 4 rows. Pass a smaller max_physical_batch_size"),
    ],
)
def test_a_device_that_is_too_small_for_a_microbatch_or_one_example(rows: int, when: str, said: str) -> None:
    model = Large()
    private = start(model, loader(batch_size=rows), sampling="shuffled", self_check=False, **PRIVATE)
    batches = iter(private.data_loader)
    logical_step(private, batches)
    model.when = when
    with refused(torch.OutOfMemoryError, said, private):
        logical_step(private, batches)
    private.detach()


def test_weights_whose_type_rounds_the_optimizers_eps_to_zero() -> None:
    model = Classifier().half()
    with refused(ValueError, "is torch.float16, which rounds the optimizer's eps of 1e-08 to zero", model=model):
        start(model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), **PRIVATE)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=1e-3), torch.optim.Adam(model.parameters(), eps=1e-4)):
        start(model, optimizer=optimizer, **PRIVATE).detach()


def test_a_bound_that_leaves_out_every_ordinary_gradient() -> None:
    for bound in (1e-30, {"a": 1.0, "b": 1e-13}):
        with pytest.warns(UserWarning, match="gradients more than 2.40 times as long are left out"):
            fastdp.DPSGD(max_grad_norm=bound)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fastdp.DPSGD(max_grad_norm=1e-11)


def test_two_models_on_one_optimizer() -> None:
    one, two = Classifier(), Classifier(1)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with refused(ValueError, "give each model an optimizer of its own", model=one):
        start(one, optimizer=optimizer)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    private = start(one, optimizer=optimizer)
    with refused(ValueError, "this model is private already"):
        start(one, optimizer=torch.optim.SGD(one.parameters(), lr=0.1))
    with refused(ValueError, "this optimizer already serves a private model"):
        start(two, optimizer=optimizer)
    with refused(ValueError, "is trained but the optimizer does not hold it"):
        start(two, optimizer=torch.optim.SGD(two.first.parameters(), lr=0.1))
    private.detach()
    start(one, optimizer=optimizer)


def test_a_checkpoint_of_another_model_noise_or_version() -> None:
    private = start(**PRIVATE)
    logical_step(private)
    saved = private.state_dict()

    fresh = start(nn.Sequential(nn.Linear(FEATURES, CLASSES)), loss_reduction="mean", **PRIVATE)
    with refused(ValueError, "belongs to another model", fresh):
        fresh.load_state_dict(saved)
    louder = start(noise_multiplier=2.0, target_delta=1e-4)
    with refused(ValueError, "made at noise multiplier 1, the run has 2", louder):
        louder.load_state_dict(saved)
    with refused(ValueError, "version None", fresh):
        fresh.load_state_dict({})


@cases("home", ["liger_kernel.transformers.model.llama", "cut_cross_entropy.transformers.llama"])
def test_fused_losses_over_a_batch_are_refused_by_name(home: str) -> None:
    model = Classifier()

    def fused(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return Classifier.forward(self, *args, **kwargs)

    fused.__module__ = home
    model.forward = fused.__get__(model)
    with refused(ValueError, home.partition(".")[0], model=model):
        start(model, **PRIVATE)
    # Token losses of the user's own are no business of it.
    private = start(model, criterion=lambda output, batch: output["logits"].square().mean(1), **PRIVATE)
    private.detach()


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": F.cross_entropy(self.head(self.table(ids).mean(1)), labels)}


@pytest.mark.parametrize(("field", "late"), [("ids", False), ("ids", True), ("labels", False), ("labels", True)])
def test_an_id_or_a_label_out_of_range_names_its_example(field: str, late: bool) -> None:
    """A raw IndexError told nobody which record to mend."""
    data = [{"ids": torch.randint(0, 9, (5,)), "labels": torch.tensor(i % 3)} for i in range(24)]
    private = start(Tokens(), DataLoader(data, batch_size=8 if late else 24), sampling="shuffled", **PRIVATE)
    batches = iter(private.data_loader)
    if late:
        private.model(**next(batches))["loss"].backward()
        private.optimizer.step()
    for item in data if late else data[-1:]:
        item[field] = item[field] + 9
    told = pytest.warns(UserWarning, match="one-example route") if late else nullcontext()
    with told, refused(ValueError, r"fails on example \d+ alone, .* Repair it", private):
        private.model(**next(batches))
    private.detach()
