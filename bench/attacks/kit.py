"""What the attacks share: their register, small models and records, and private runs that take every record, without noise."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import traceback
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.clip.policy import Policy
from fastdp.verify.state import StateCheck

FEATURES, CLASSES = 8, 3
Record = dict[str, Any]
Sums = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Attack:
    """One way to move a release by more than its bound.

    Args:
        kind: "data", "mistakes", "files" or "leaks".
        shows: one sentence, true where the attack succeeds.
        run: returns how far a record moved what was released, in units of what is allowed; raises if it was refused.
        off: the functions that hold it beyond the clip and the self-check, by dotted name, and what replaces them.
        mode: how a run that holds it is started.
        unmode: how a run without protection is started.
    """

    name: str
    kind: str
    shows: str
    run: Callable[[Any], float]
    off: Mapping[str, Any]
    mode: Mapping[str, Any]
    unmode: Mapping[str, Any]

    @contextlib.contextmanager
    def unprotected(self) -> Iterator[None]:
        """Switch off what holds the attack: for records and mistakes the clip, for all the functions in ``off``."""
        with contextlib.ExitStack() as stack:
            if self.kind != "files":
                stack.enter_context(unittest.mock.patch.object(Policy, "scales", _unclipped))
            for target, replacement in self.off.items():
                stack.enter_context(unittest.mock.patch(target, replacement))
            yield


ATTACKS: dict[str, Attack] = {}


def register(kind: str, *, mode: Mapping[str, Any] | None = None, unmode: Mapping[str, Any] | None = None) -> Any:
    """A decorator factory for the attacks of one kind: ``@attack("what it shows", off={...})``."""
    every = unmode or {}

    def attack(
        shows: str, off: Mapping[str, Any] | None = None, unmode: Mapping[str, Any] | None = None
    ) -> Callable[[Any], Any]:
        def add(function: Callable[[Any], float]) -> Callable[[Any], float]:
            name = function.__name__
            assert name not in ATTACKS, name
            ATTACKS[name] = Attack(name, kind, shows, function, off or {}, mode or {}, {**every, **(unmode or {})})
            return function

        return add

    return attack


def _unclipped(policy: Policy, upper: Any) -> torch.Tensor:
    return torch.ones_like(upper.weights(policy.bounds))


def nothing(*_: Any, **__: Any) -> None:
    """Stands for a check that finds nothing."""


@contextlib.contextmanager
def watch_nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


#: Switches off the state check of parameters and buffers.
UNWATCHED = {
    f"{StateCheck.__module__}.StateCheck.{name}": replacement
    for name, replacement in (("forward", watch_nothing), ("tracing", watch_nothing), ("require_settled", nothing))
}


@dataclasses.dataclass(frozen=True)
class Release:
    """What logical batches give away.

    Args:
        steps: of each, clipped and summed gradients by parameter.
        rest: everything else in the model's state: buffers, and weights that moved although the learning rate was 0.
    """

    steps: list[Sums]
    rest: dict[str, torch.Tensor]

    @property
    def sums(self) -> Sums:
        """Of the last one."""
        return self.steps[-1]


def stack(items: Sequence[Record]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}


@dataclasses.dataclass(frozen=True)
class Task:
    """What a user would write.

    Args:
        model: makes the same model each time. Its forward takes a batch by name and returns ``loss``, or outputs for
            ``criterion``.
        collate: records to a batch.
        loop: what the loop makes of a batch before it calls the model.
        criterion: loss of (output, batch), averaged over the batch, for a loss outside the model.
        physical: most records in one forward pass.
        options: further arguments of `fastdp.make_private`.
    """

    model: Callable[[], nn.Module]
    collate: Callable[[Sequence[Record]], dict[str, torch.Tensor]] = stack
    loop: Callable[[Any], Any] = lambda batch: batch
    criterion: Callable[[Any, Any], torch.Tensor] | None = None
    physical: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def flatten(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([total.double().flatten() for total in sums.values()])


def distance(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    """How far the sums of two releases lie apart, as vectors; infinite if only one is finite."""
    gap = float(flatten({name: total.double() - two[name].double() for name, total in one.items()}).norm())
    return gap if gap == gap else float("inf")


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def unless(held: bool) -> float:
    """1 if what must hold does; infinite otherwise."""
    return 1.0 if held else float("inf")


def records(count: int = 8, size: float = 1.0, seed: int = 0) -> list[Record]:
    generator = torch.Generator().manual_seed(seed)
    return [{"x": size * torch.randn(FEATURES, generator=generator), "labels": i % CLASSES} for i in range(count)]


def outlier(size: float) -> Record:
    """A record so many times as large."""
    return records(1, size, 5)[0]


def constant(value: float, label: int = 0) -> Record:
    return {"x": torch.full((FEATURES,), value), "labels": label}


class Model(nn.Module):
    """A module that is made of the same numbers each time, of the parts that a subclass names."""

    parts: Mapping[str, Callable[[], Any]] = {}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for kind in reversed(type(self).__mro__):
            for name, make in vars(kind).get("parts", {}).items():
                setattr(self, name, make())


class Net(Model):
    """Two linear layers and their own cross-entropy; subclasses change what lies before and between."""

    parts = {"first": lambda: nn.Linear(FEATURES, 16), "second": lambda: nn.Linear(16, CLASSES)}

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.second(self.between(torch.tanh(self.first(self.before(x)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def net(base: type[Model] = Net, /, **methods: Any) -> type[Model]:
    """A class of models with other methods than its own, each of which takes the module first."""
    return type(base.__name__, (base,), methods)


class Recording(Net):
    """Has a buffer and a frozen weight, in which subclasses record what they see."""

    parts = {"centre": lambda: nn.Parameter(torch.zeros(FEATURES), requires_grad=False)}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))


class Scores(Model):
    """Two linear layers whose loss is the user's own."""

    parts = {"first": lambda: nn.Linear(FEATURES, 16), "second": lambda: nn.Linear(16, 8)}

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Words(Model):
    """A table of 50 tokens and a layer over what it says, which predicts the next token."""

    parts = {"table": lambda: nn.Embedding(50, 16), "head": lambda: nn.Linear(16, 50)}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> Any:
        logits = self.head(self.between(input_ids, self.table(input_ids)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    def between(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class Classes(Words):
    """Words whose mean is classified."""

    parts = {"table": lambda: nn.Embedding(50, 8), "head": lambda: nn.Linear(8, CLASSES)}

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: torch.Tensor) -> Any:
        hidden = self.between(input_ids, self.table(input_ids).mean(1))
        return {"loss": F.cross_entropy(self.head(hidden), labels)}


class Tagger(Words):
    """Scores of each token, for the user's own loss."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **_: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.table(input_ids)))


def gpt2(dropout: float = 0.0, positions: int = 64) -> Any:
    import transformers

    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes: dict[str, Any] = {"vocab_size": 50, "n_positions": positions, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))


#: Five times a token that no other record holds.
RARE: Record = {"input_ids": torch.full((5,), 49), "labels": 0}


def tokens(count: int, lengths: Sequence[int], vocabulary: int = 50, seed: int = 0) -> list[Record]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(3, vocabulary, (lengths[i % len(lengths)],), generator=generator)}
        for i in range(count)
    ]


def classed(count: int = 32) -> list[Record]:
    """Records of five tokens, none of them 49, and a class each."""
    return [{**record, "labels": i % CLASSES} for i, record in enumerate(tokens(count, [5], 49))]


def padded(items: Sequence[Record], *, left: bool = False) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels, padded to the longest record."""
    longest = max(len(item["input_ids"]) for item in items)

    def pad(values: torch.Tensor, value: int) -> torch.Tensor:
        gap = longest - len(values)
        return F.pad(values, (gap, 0) if left else (0, gap), value=value)

    return {
        "input_ids": torch.stack([pad(i["input_ids"], 0) for i in items]),
        "attention_mask": torch.stack([pad(torch.ones_like(i["input_ids"]), 0) for i in items]),
        "labels": torch.stack([pad(i["labels" if "labels" in i else "input_ids"], -100) for i in items]),
    }


left_padded = functools.partial(padded, left=True)


def packed(items: Sequence[Record]) -> dict[str, torch.Tensor]:
    """Records one behind the other in one row, and whose each token is."""
    row = torch.cat([item["input_ids"] for item in items])[None]
    units = torch.cat([torch.full((len(item["input_ids"]),), n) for n, item in enumerate(items)])[None]
    return {"input_ids": row, "labels": row, "units": units}


def is_refusal(error: BaseException) -> bool:
    """Whether the library raised an error by a statement of its own. What a backward pass raises lies below torch's frames."""
    last, place = traceback.extract_tb(error.__traceback__)[-1], Path(fastdp.__file__).parent
    inside = Path(last.filename).is_relative_to(place) and not Path(last.filename).is_relative_to(Path(__file__).parent)
    return (last.line or "").startswith("raise") and inside


def weakest(run: Callable[..., float], cases: Iterable[Any]) -> float:
    """The most that any of several forms of an attack moved; raises the last refusal if all were refused."""
    moved, refused = [], None
    for case in cases:
        try:
            moved.append(run(*case) if isinstance(case, tuple) else run(case))
        except Exception as error:
            if not is_refusal(error):
                raise
            refused = error
    if not moved and refused is not None:
        raise refused
    return max(moved)


NOISE: Mapping[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-5}


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Library:
    """This library.

    Args:
        options: arguments of `fastdp.make_private` that hold for all runs.
    """

    def __init__(self, **options: Any):
        self.options = options

    def start(self, task: Task, records: Sequence[Record], bound: float = 1.0, **options: Any) -> Any:
        """A private run without noise, unless the options say otherwise."""
        model = task.model().train()
        options = {**options, **task.options, **self.options}
        if task.criterion is not None:
            options = {"loss_reduction": "mean", **options}
        batch_size = options.pop("batch_size", len(set(map(str, options.get("user_ids", range(len(records)))))))
        return fastdp.make_private(
            model,
            options.pop("optimizer", None) or torch.optim.SGD(_trained(model).values(), lr=0.0),
            DataLoader(records, batch_size=batch_size, collate_fn=task.collate),  # type: ignore[arg-type]
            method=options.pop("method", fastdp.DPSGD(max_grad_norm=bound)),
            max_physical_batch_size=task.physical,
            **{"noise_multiplier": 0.0, "epochs": 1, **options},
        )

    def steps(self, private: Any, task: Task) -> Iterator[Sums]:
        """Train to the end of an epoch; the released sums of each logical step."""
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            output = private.model(**task.loop(batch))
            loss = output["loss"] if task.criterion is None else task.criterion(output, batch)
            loss.backward()
            private.optimizer.step()
            if private.last_step_done:
                yield self.sums(private)

    @staticmethod
    def sums(private: Any) -> Sums:
        """What the latest step released, before it was divided by the expected batch size."""
        rows = private.data_loader.batch_size
        grads = {n: p.grad for n, p in _trained(private.model).items() if p.grad is not None}
        return {name: grad.detach().float() * rows for name, grad in grads.items()}

    def release(
        self,
        task: Task,
        records: Sequence[Record],
        bound: float = 1.0,
        passes: int = 1,
        change: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> Release:
        """What logical batches of every record give away; ``change`` is done to the run before the last of the passes."""
        torch.manual_seed(0)
        private = self.start(task, records, bound, **{"epochs": passes, **options})
        steps: list[Sums] = []
        try:
            for number in range(passes):
                if change is not None and number == passes - 1:
                    change(private)
                steps += self.steps(private, task)
        finally:
            private.detach()
        return Release(steps, {name: t.detach().clone() for name, t in private.model.state_dict().items()})

    def moved(
        self, task: Task, records: Sequence[Record], extra: Record, bound: float = 1.0, *given: Any, first: bool = False
    ) -> float:
        """How far one more record moves the last release, in units of ``bound``; infinite for what leaves without noise.

        Without other records it is the size of one record's own share. What else is given is for `release`.
        """
        more = self.release(task, [extra, *records] if first else [*records, extra], bound, *given)
        if not records:
            return float(flatten(more.sums).nan_to_num(nan=math.inf).norm()) / bound
        less = self.release(task, records, bound, *given)
        if any(not equal(more.rest[name], less.rest[name]) for name in more.rest):
            return math.inf
        return distance(more.sums, less.sums) / bound

    def moved_by_change(
        self, task: Task, others: Sequence[Record], before: Record, after: Record, bound: float = 0.2
    ) -> float:
        """How far a record moves the fifth release that becomes another record once four were verified."""
        released = []
        for extra in ([], [before]):
            data = [*others, *extra]

            def change(_: Any, data: list[Record] = data) -> None:
                data[len(others) :] = [after] * len(data[len(others) :])

            released.append(self.release(task, data, bound, 5, change).sums)
        return distance(*released) / bound

    def moved_by_late_outlier(self, task: Task) -> float:
        """`moved_by_change` of a record that becomes a thousand times as large."""
        return self.moved_by_change(task, records(16), records(1)[0], {**outlier(1e3), "labels": 0})

    def go_on(self, folder: Path, steps: int, *, resume: bool) -> int:
        """Begin or resume a small private run in a folder and take some steps; how many it knew of before."""
        task = Task(Net, options={**NOISE, "output_dir": folder, "resume": resume, "epochs": 8})
        private = self.start(task, records())
        try:
            before: int = private.steps_done
            for _ in range(steps):
                list(self.steps(private, task))
            return before
        finally:
            private.detach()
