"""What the attacks share: small models and records, and how far one more record moves what a system releases."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fastdp.distribution import version_of

FEATURES, CLASSES = 8, 3
Record = dict[str, Any]


class NotApplicable(Exception):
    """The attack is about something that this system does not have."""


@dataclasses.dataclass(frozen=True)
class Release:
    """What one logical batch of a system without noise gives away.

    Attributes:
        sums: clipped and summed gradients by parameter.
        rest: everything else that leaves with the model's state: buffers, and weights that moved though the rate was 0.
    """

    sums: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor]


def stack(items: Sequence[Record]) -> dict[str, torch.Tensor]:
    """Each field of the records, stacked."""
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}


@dataclasses.dataclass(frozen=True)
class Task:
    """What a user would write, for any system.

    Args:
        model: makes the same model each time; its forward takes a batch by name and returns ``loss``, or outputs for
            ``criterion``.
        collate: records to a batch.
        loop: what the loop makes of a batch before it calls the model.
        criterion: loss of (output, batch), averaged over the batch, for a loss outside the model.
        physical: most records in one forward pass.
        options: further arguments of `fastdp.make_private`, where an attack is about one of them.
    """

    model: Callable[[], nn.Module]
    collate: Callable[[Sequence[Record]], dict[str, torch.Tensor]] = stack
    loop: Callable[[Any], Any] = lambda batch: batch
    criterion: Callable[[Any, Any], torch.Tensor] | None = None
    physical: int | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class System(ABC):
    """A library under attack."""

    #: How it is called, the module that has to be there, and the distribution whose version counts.
    name: str
    module: str
    package: str

    @property
    def version(self) -> str:
        """Of the distribution; empty for one that was not installed as such."""
        return version_of(self.package) or ""

    @abstractmethod
    def release(self, task: Task, records: Sequence[Record], bound: float, noise: float = 0.0) -> Release:
        """The clipped sum of one logical batch that holds every record, with noise of this multiplier."""


def moved(
    system: System, task: Task, records: Sequence[Record], extra: Record, bound: float = 1.0, *, first: bool = False
) -> float:
    """How far one more record moves the release, in units of ``bound``; inf for what leaves without any noise.

    Without other records it is the size of one record's own share.
    """
    more = system.release(task, [extra, *records] if first else [*records, extra], bound)
    if records:
        less = system.release(task, records, bound)
    else:
        less = Release({name: torch.zeros_like(t) for name, t in more.sums.items()}, more.rest)
    if any(not same(more.rest[name], less.rest[name]) for name in more.rest):
        return math.inf
    gap = apart(more.sums, less.sums)
    return gap / bound if not math.isnan(gap) else math.inf


def flat(sums: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All numbers of a release's sums, float64."""
    return torch.cat([total.double().flatten() for total in sums.values()])


def apart(one: Mapping[str, torch.Tensor], two: Mapping[str, torch.Tensor]) -> float:
    """How far the sums of two releases are from each other, as vectors."""
    return float(flat({name: total.double() - two[name].double() for name, total in one.items()}).norm())


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN to NaN."""
    return a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())


def records(count: int = 8, size: float = 1.0, seed: int = 0) -> list[Record]:
    """Features and a class each."""
    generator = torch.Generator().manual_seed(seed)
    return [{"x": size * torch.randn(FEATURES, generator=generator), "labels": i % CLASSES} for i in range(count)]


def outlier(size: float) -> Record:
    """A record so many times as large."""
    return records(1, size, 5)[0]


def beside_a_late(
    library: Any, task: Task, others: Sequence[Record], before: Record, after: Record, bound: float = 0.2
) -> float:
    """How far a record moves the release, in units of ``bound``, that becomes another when all was looked at already."""
    released = []
    for extra in ([], [before]):
        data = [*others, *extra]

        def change(_: Any, data: list[Record] = data) -> None:
            data[len(others) :] = [after] * len(data[len(others) :])

        released.append(library.train(task, data, bound, 5, change)[-1])
    return apart(*released) / bound


def beside_an_outlier(library: Any, task: Task) -> float:
    """`beside_a_late` of a record that becomes an outlier."""
    after = {"x": torch.full((FEATURES,), 1e3), "labels": 0}
    return beside_a_late(library, task, records(16), records(1)[0], after)


class Model(nn.Module):
    """A module that is made of the same numbers each time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)


class Net(Model):
    """Two linear layers and their own cross-entropy; subclasses change what lies before and between."""

    #: What makes further modules and parameters, by name.
    parts: Mapping[str, Callable[[], Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
        for name, make in self.parts.items():
            setattr(self, name, make())

    def before(self, x: torch.Tensor) -> torch.Tensor:
        """What enters the first layer."""
        return x

    def between(self, hidden: torch.Tensor) -> torch.Tensor:
        """What enters the second."""
        return hidden

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        """The mean loss of a batch, and its logits."""
        logits = self.second(self.between(torch.tanh(self.first(self.before(x)))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def net(base: type[Model] = Net, /, **methods: Any) -> type[Model]:
    """A class of models with other methods than its own, each of which takes the module first."""
    return type(base.__name__, (base,), methods)


class Keeping(Net):
    """Has a buffer and a frozen weight, in which subclasses keep what they see."""

    mean: torch.Tensor

    parts = {"centre": lambda: nn.Parameter(torch.zeros(FEATURES), requires_grad=False)}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))


class Scores(Model):
    """Two linear layers whose loss is the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
        """Scores of each row."""
        return self.second(torch.tanh(self.first(x)))


class Words(Model):
    """A table of 50 tokens and a layer over what it says; what lies between, and the loss, is a subclass's own."""

    width, outputs = 16, 50

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, self.width), nn.Linear(self.width, self.outputs)


class Asking(Words):
    """Words whose classes are told by their mean."""

    width, outputs = 8, CLASSES

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The mean loss of a batch."""
        return {"loss": F.cross_entropy(self.head(self.asked(input_ids, self.table(input_ids).mean(1))), labels)}

    def asked(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads, after a question about the batch."""
        return hidden


class Next(Words):
    """Words that foretell the next one."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        """The mean loss of a batch."""
        logits = self.head(self.between(input_ids, self.table(input_ids)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

    def between(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the head reads."""
        return hidden


#: Five times a token that none of them holds.
ASKED: Record = {"input_ids": torch.full((5,), 49), "labels": 0}


def classed(count: int = 32) -> list[Record]:
    """Records of five tokens, none of them 49, and a class each."""
    return [{**record, "labels": i % CLASSES} for i, record in enumerate(tokens(count, [5], 49))]


def packed(items: Sequence[Record]) -> dict[str, torch.Tensor]:
    """Records one behind the other in one row, and whose each token is."""
    row = torch.cat([item["input_ids"] for item in items])[None]
    units = torch.cat([torch.full((len(item["input_ids"]),), n) for n, item in enumerate(items)])[None]
    return {"input_ids": row, "labels": row, "units": units}


def tokens(count: int, lengths: Sequence[int], vocabulary: int = 50, seed: int = 0) -> list[Record]:
    """Token ids of these lengths in turn."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(3, vocabulary, (lengths[i % len(lengths)],), generator=generator)}
        for i in range(count)
    ]


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
