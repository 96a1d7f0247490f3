"""Register ordinary training programs, run them without and with privacy, and judge the outcome.

A program is a function that returns a `Case`: model, data, and the loss that its loop computes. `Case.loop` replaces the
whole loop where the loop is the point. The decorator states the outcome: the fast route (``uses``), ``one-example``, or
``refused: WORD`` where the message must contain that word. Alternatives are separated by `` or ``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import logging
import os
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from fastdp.bench.fuzz import norms, summed
from fastdp.bench.record import markdown
from torch.utils.data import DataLoader

import fastdp
from fastdp.calls.batches import map_tensors, tensors

FAMILIES = ("stock", "adapters", "custom", "losses", "data", "draws", "loops", "trainers", "coupled")
#: Relative error of a clipped sum in float32 against float64 autograd; about 1e-5 of it is the certified clip's.
EXACT = 1e-4
ROWS, BATCH = 24, 8
_PACKAGE = str(Path(fastdp.__file__).parent)


def plain_loss(model: Any, batch: Any) -> torch.Tensor:
    """The loss of a model of transformers."""
    return model(**batch).loss


@dataclass
class Case:
    """What a program trains.

    Attributes:
        model, rows, collate: the model, its data set, and the loader's collator.
        loss: the loss that the loop computes from (model, batch).
        criterion: losses by row of (output, batch); `loss` is then the forward pass alone.
        optimizer: makes the optimizer of a model; AdamW of what is trained, if None.
        options: further arguments of `fastdp.make_private`; `loader` those of the DataLoader.
        after_backward, after_step, after_epoch: what the loop does there, of (model, optimizer, step or epoch).
        loop: replaces the loop; of a `Run`.
        exact: the clipped sum of a release is compared with autograd, one example at a time. False for losses that draw.
        late: a refusal may come after releases, because its cause does.
        device: where it trains: its loop moves each batch there, as on a GPU.
        penalty: what the loop adds to the loss, of the model's weights; it is not clipped.
    """

    model: Any
    rows: Any
    collate: Callable[[list[Any]], Any] | None = None
    loss: Callable[[Any, Any], torch.Tensor] = plain_loss
    criterion: Callable[[Any, Any], torch.Tensor] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    epochs: int = 1
    after_backward: Callable[[Any, Any, int], object] | None = None
    after_step: Callable[[Any, Any, int], object] | None = None
    after_epoch: Callable[[Any, Any, int], object] | None = None
    loop: Callable[[Run], object] | None = None
    exact: bool = True
    late: bool = False
    device: torch.device | None = None
    penalty: Callable[[Any], torch.Tensor] | None = None

    def moved(self, batch: Any) -> Any:
        """A batch of the loader where the case trains."""
        return batch if self.device is None else map_tensors(batch, lambda t: t.to(self.device))

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.optimizer is not None:
            return self.optimizer(self.model)
        return torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-3)

    def make_loader(self) -> DataLoader:
        options = {"batch_size": BATCH, "shuffle": True, "collate_fn": self.collate, **self.loader}
        if "batch_sampler" in options or "sampler" in options:
            options.pop("shuffle")
        if "batch_sampler" in options:
            options.pop("batch_size")
        return DataLoader(self.rows, **options)


@dataclass(frozen=True)
class Program:
    """A registered program: how it is built and what should become of it."""

    name: str
    family: str
    build: Callable[[], Case]
    expect: str
    why: str

    def accepts(self, outcome: str, message: str) -> bool:
        """Whether an outcome is among the stated ones; the fast route is always better than the one-example route."""
        for stated in self.expect.split(" or "):
            kind, _, word = stated.partition(": ")
            if kind == outcome and word.lower() in message.lower():
                return True
            if kind == "one-example" and outcome == "uses":
                return True
        return False

    def on(self, device: torch.device) -> Program:
        """The same program, trained on another device than the processor."""

        def moved() -> Case:
            case = self.build()
            case.model.to(device)
            case.device = device
            return case

        return replace(self, build=moved)


class Moving:
    """A loader of which a loop moves every batch."""

    def __init__(self, loader: Any, case: Case):
        self._loader, self._case = loader, case

    def __iter__(self) -> Iterator[Any]:
        return map(self._case.moved, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


PROGRAMS: dict[str, Program] = {}


def program(expect: str = "uses", why: str = "") -> Callable[[Callable[[], Case]], Any]:
    """Register a program under its function's name; `why` says in one line what justifies another route than the fast one."""
    if expect != "uses" and not why:
        raise ValueError("say why the program is not on the fast route")

    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        register(build.__name__, build, expect, why)
        return build

    return add


def register(name: str, build: Callable[[], Case], expect: str = "uses", why: str = "") -> None:
    """Register a program under a name; its family is the module of `build`."""
    if name in PROGRAMS:
        raise ValueError(f"two programs are called {name}")
    PROGRAMS[name] = Program(name, build.__module__.rpartition(".")[2], build, expect, why)


def register_all(
    table: dict[str, Any],
    make: Callable[[Any], Case],
    prefix: str = "",
    suffix: str = "",
    expect: str = "uses",
    why: str = "",
) -> None:
    """Register the members of a class of programs: `make` builds each of them from its entry in the table."""
    for name, value in table.items():
        build = functools.update_wrapper(functools.partial(make, value), make)
        register(f"{prefix}{name}{suffix}", build, expect, why)


def load() -> dict[str, Program]:
    """All programs, in the order of their families."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("trl").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for family in FAMILIES:
        importlib.import_module(f"tests.honest.{family}")
    return PROGRAMS


class Run:
    """What a loop is given: the case, and `start`, which is `make_private` or nothing."""

    def __init__(self, case: Case, private: bool):
        self.case, self.is_private = case, private
        self.private: Any = None

    def start(
        self, model: Any = None, optimizer: Any = None, loader: Any = None, **options: Any
    ) -> tuple[Any, Any, Any]:
        """(model, optimizer, loader) of the case or as given, made private in the runs that are."""
        case = self.case
        model = case.model if model is None else model
        optimizer = case.make_optimizer() if optimizer is None else optimizer
        loader = case.make_loader() if loader is None else loader
        if not self.is_private:
            return model, optimizer, loader if case.device is None else Moving(loader, case)
        settings = {"noise_multiplier": 1.0, "target_delta": 1e-3, "epochs": case.epochs, **case.options, **options}
        if case.criterion is not None:
            settings["criterion"] = case.criterion
        self.private = fastdp.make_private(model, optimizer, loader, **settings)
        model, optimizer, loader = self.private
        return model, optimizer, loader if case.device is None else Moving(loader, case)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        """What the loop differentiates."""
        own = self.loss_of_rows(model, batch)
        return own if self.case.penalty is None else own + self.case.penalty(model)

    def loss_of_rows(self, model: Any, batch: Any) -> torch.Tensor:
        """The same without a penalty of the weights."""
        found = self.case.loss(model, batch)
        if self.case.criterion is None:
            return found
        return self.private.loss(found, batch) if self.is_private else self.case.criterion(found, batch).mean()


def usual_loop(run: Run) -> None:
    """The loop of most programs: one backward pass and one step for each batch."""
    case = run.case
    model, optimizer, loader = run.start()
    for epoch in range(case.epochs):
        for step, batch in enumerate(loader):
            run.loss(model, batch).backward()
            if case.after_backward:
                case.after_backward(model, optimizer, step)
            optimizer.step()
            if case.after_step:
                case.after_step(model, optimizer, step)
            optimizer.zero_grad()
        if case.after_epoch:
            case.after_epoch(model, optimizer, epoch)


@dataclass
class Result:
    """What became of a program at one seed."""

    name: str
    family: str
    expected: str
    seed: int
    outcome: str = ""
    made: int = 0
    paid: int = 0
    seconds: float = 0.0
    message: str = ""
    error: float | None = None
    ok: bool = False

    def line(self) -> str:
        """One line for a terminal."""
        error = "" if self.error is None else f" error {self.error:.0e}"
        mark = "  " if self.ok else "! "
        return (
            f"{mark}{self.name:34} {self.outcome:12} {self.made}/{self.paid}{error} {self.seconds:.1f}s {self.message}"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)  # noqa: NPY002 - programs draw from the global generator


def _is_refusal(error: BaseException) -> bool:
    """Raised on purpose by this package, rather than by a fault in it or a library below it."""
    if isinstance(error, (AttributeError, AssertionError, LookupError, SystemExit)):
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename.startswith(_PACKAGE) and (last.line or "").lstrip().startswith("raise ")


def _without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in attribute or (attribute == "p" and "Dropout" in type(module).__name__)
            ):
                setattr(module, attribute, 0.0)
    return model


def _in_float64(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _in_float64(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_in_float64(entry) for entry in value)
    return value


def sum_error(build: Callable[[], Case]) -> float:
    """Error of one noiseless release against float64 autograd of one example at a time.

    The clipping bound is the median norm, so that half of the examples are clipped. The error is relative to the root of
    the sum of squared clipped norms: a sum that nearly cancels would hide what matters.
    """
    _seed(0)
    case = build()
    exact = _without_dropout(case.model).double()
    trained = {n: p for n, p in exact.named_parameters() if p.requires_grad}
    items = [case.rows[index] for index in range(BATCH)]
    collate = case.make_loader().collate_fn
    found = []
    for item in items:
        batch = case.moved(_in_float64(collate([item])))
        run = Run(case, private=False)
        exact.zero_grad(set_to_none=True)
        run.loss_of_rows(exact, batch).backward()
        found.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()})
    sizes = norms(found)
    bound = float(sizes.median())
    scales = (bound / sizes.clamp(min=1e-30)).clamp(max=1)
    truth = summed(found, scales)
    if case.penalty is not None:
        gradients = torch.autograd.grad(case.penalty(exact), list(trained.values()))
        truth += BATCH * torch.cat([gradient.flatten() for gradient in gradients])
    _seed(0)
    case = build()
    case.rows, case.loader = items, {key: value for key, value in case.loader.items() if "sampler" not in key}
    model = _without_dropout(case.model)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    run = Run(case, private=True)
    # Weights move so far that their own rounding does not show in the difference.
    rate = 1e4 / bound
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    method = fastdp.DPSGD(max_grad_norm=bound)
    _, _, loader = run.start(optimizer=optimizer, method=method, noise_multiplier=0.0, target_delta=None, epochs=1)
    # Of another number of rows than any batch.
    few, evaluated = case.moved(collate(items[:3])), []
    try:
        for batch in loader:
            run.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluated.append(_evaluated(case, few))
    finally:
        run.private.detach()
    evaluated.append(_evaluated(case, few))
    if not all(torch.allclose(a, b, equal_nan=True) for a, b in zip(*evaluated, strict=True)):
        raise ValueError("evaluation gives something else while the run is private")
    after = dict(model.named_parameters())
    moved = torch.cat([(before[n].double() - after[n].detach().double()).flatten() for n in before]) * BATCH / rate
    return float((moved - truth).norm() / (scales * sizes).norm())


def _evaluated(case: Case, batch: Any) -> list[torch.Tensor]:
    """What the loop computes of a batch in evaluation mode."""
    mode = case.model.training
    _seed(0)
    found = list(tensors(case.loss(case.model.eval(), copy.deepcopy(batch))))
    case.model.train(mode)
    return [t.detach() for t in found]


def run_plainly(chosen: Program) -> None:
    """Run the program without privacy; its own errors pass through."""
    _seed(0)
    case = chosen.build()
    run = Run(case, private=False)
    with _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (case.loop or usual_loop)(run)


def run_privately(chosen: Program, seed: int = 0, compare: bool = True) -> Result:
    """Run the program with `make_private`, and judge it."""
    result = Result(chosen.name, chosen.family, chosen.expect, seed)
    _seed(seed)
    begin = time.process_time()
    case = chosen.build()
    run = Run(case, private=True)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, _quiet():
        warnings.simplefilter("always")
        try:
            (case.loop or usual_loop)(run)
            result.outcome = str(run.private.route)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            result.outcome = "refused" if _is_refusal(error) else "crash"
            result.message = f"{type(error).__name__}: {error}".replace("\n", " ")
        if run.private is not None:
            result.made, result.paid = run.private.steps_done, run.private.total_steps
            with contextlib.suppress(Exception):
                run.private.detach()
        said = [str(entry.message).replace("\n", " ") for entry in caught]
    result.seconds = time.process_time() - begin
    result.ok = chosen.accepts(result.outcome, result.message)
    if result.outcome == "refused" and result.made and not case.late:
        result.ok, result.message = False, f"refused after {result.made} releases. {result.message}"
    if result.outcome in ("uses", "one-example"):
        if result.made != result.paid:
            both = [text for text in said if {str(result.made), str(result.paid)} <= set(re.findall(r"\d+", text))]
            result.ok &= bool(both)
            result.message = both[0] if both else "releases paid for were not made, without a warning"
        elif not result.ok:
            result.message = next((text for text in said if "one-example" in text), "")
    if compare and case.exact and case.loop is None and result.ok and result.outcome != "refused":
        _compare(chosen, result)
    return result


def _compare(chosen: Program, result: Result) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result.error = sum_error(chosen.build)
        except Exception as error:
            result.ok, result.message = False, f"comparing sums: {type(error).__name__}: {error}".replace("\n", " ")
        else:
            if not result.error < EXACT:
                result.ok, result.message = False, "the clipped sum differs from that of one example at a time"


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """One row of the committed table: all seeds of a program; the message is of the first seed that went wrong."""
    shown = next((r for r in results if not r.ok), results[0])
    routes = sorted({r.outcome for r in results})
    return {
        **{key: asdict(shown)[key] for key in ("name", "family", "expected", "made", "paid", "message")},
        "route": ", ".join(routes),
        "why": PROGRAMS[shown.name].why,
        "seeds": len(results),
        "held": sum(r.ok for r in results),
        "seconds": round(sum(r.seconds for r in results) / len(results), 2),
    }


def table(figures: Sequence[dict[str, Any]]) -> list[str]:
    """Two Markdown tables of the figures: routes by family; and programs that run one example at a time, or not as expected."""
    kinds = ("uses", "one-example", "refused")
    families = {row["family"]: [own for own in figures if own["family"] == row["family"]] for row in figures}
    counts = [
        [
            family,
            len(own),
            *(sum(row["route"] == kind for row in own) for kind in kinds),
            sum(row["held"] < row["seeds"] for row in own),
        ]
        for family, own in families.items()
    ]
    lines = markdown(["family", "programs", "fast", "one example", "refused", "not as expected"], counts)
    others = []
    for row in figures:
        held = row["held"] == row["seeds"]
        if row["route"] not in ("uses", "refused") or not held:
            route = row["route"] if held else f"**{row['route']}** ({row['held']} of {row['seeds']} seeds)"
            others.append([row["name"].replace("_", " "), route, row["why"] if held else row["message"]])
    return [*lines, "", *markdown(["program", "route", "reason"], others)]
