"""Replaying neighbouring data sets with the same randomness, to see how far one record moves what a run releases.

A proof covers every record; this covers those that are tried. It looks where proofs about programs fail: at the model,
the collator and the loss that are really there (compare "Re:cord-play", arXiv 2602.17454).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastdp.calls.batches import accepted
from fastdp.calls.randomness import DropoutDisabled
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.clip.policy import Policy
from fastdp.engine.loss.boundary import require_loss
from fastdp.private.method import Installed, Method
from fastdp.private.observer import Observer
from fastdp.private.preparation import Outcome

#: Room for float32's rounding among the records of one sum, in units of the bound.
ROUNDING = 1e-4
#: Records that share a forward pass; an odd number of others leaves room for one more beside the last.
RECORDS_PER_PASS = 4

#: The examples of one unit of privacy.
Unit = list[Any]
Start = Callable[[Sequence[Unit]], Any]


@dataclass(frozen=True)
class Trial:
    """One pair of neighbouring data sets.

    Args:
        kind: ``remove``, ``replace``, ``add``, ``alone`` (one record without others) or ``again`` (the same data twice).
        what: the record in question, in words.
        moved: distance of the two releases in units of what a run allows them; None where nothing was released.
        said: why nothing was.
        where: share of each parameter in the squared distance, the largest first.
    """

    kind: str
    what: str
    moved: float | None = None
    said: str = ""
    where: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.moved is None:
            return f"{self.kind} {self.what}: nothing was released ({self.said})"
        return f"{self.kind} {self.what}: {self.moved:.4f}"


@dataclass(frozen=True)
class Evidence:
    """What `prove` found; true if no trial moved a release by more than its bound, and some trial moved it at all.

    Attributes:
        trials: every pair of neighbours that was tried.
    """

    trials: tuple[Trial, ...]

    @property
    def worst(self) -> Trial | None:
        """The trial that moved a release most; None if nothing was ever released."""
        released = [trial for trial in self.trials if trial.moved is not None]
        return max(released, key=lambda trial: trial.moved or 0.0, default=None)

    @property
    def holds(self) -> bool:
        worst = self.worst
        return worst is not None and worst.moved is not None and 0 < worst.moved <= 1 + ROUNDING

    def __bool__(self) -> bool:
        return self.holds

    def __str__(self) -> str:
        worst = self.worst
        if worst is None:
            return f"nothing was released in any of {len(self.trials)} trials: {self.trials[0].said}"
        where = ", ".join(f"{name} {share:.0%}" for name, share in list(worst.where.items())[:3])
        verdict = "within the bound" if self.holds else "NOT within the bound"
        return (
            f"largest movement {worst.moved:.4f} of the bound, {verdict} ({worst.kind} {worst.what}; {where or 'nowhere'}); "
            f"{len(self.trials)} trials"
        )


def prove_run(
    start: Start,
    units: Sequence[Unit],
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    longest: int | None = None,
) -> Evidence:
    """Replay neighbours of some units, each through a whole private step without noise.

    Args:
        start: begins a run over these units that takes all of them in each step, without noise and with a learning rate
            of 0, and returns it.
        units: of the user's data set, each the list of its examples before collation; at least 3.
        loss: (model, batch) -> the loss that ``backward`` starts from; by default the one that the model returns.
        longest: most tokens of an example that is made longer; by default 8 times the longest of these.

    Raises:
        ValueError: for fewer than 3 units; and whatever the run refuses the units as they are with.
    """
    if len(units) < 3:
        raise ValueError(f"{len(units)} records have no neighbours to speak of: give at least 3")
    base, spare = list(units[: 2 * RECORDS_PER_PASS - 1]), units[-1]
    longest = longest or long_length(units)
    release = _Releases(start, loss or _model_loss)
    before = release(base)
    trials = [release.compare("again", "the same records", base, before)]
    for index in (0, len(base) - 1):
        rest = base[:index] + base[index + 1 :]
        trials.append(release.compare("remove", f"record {index}", rest, before))
    swapped = [*base[:-1], spare if len(units) > len(base) else base[0]]
    trials.append(release.compare("replace", "a record by another", swapped, before, allowed=2.0))
    trials.append(release.compare("add", "a duplicate", [*base, base[0]], before))
    for what, example in extremes(base[-1][0], longest):
        unit = [example, *base[-1][1:]]
        trials.append(release.compare("add", what, [*base, unit], before))
        trials.append(release.compare("alone", what, [unit], None))
    return Evidence(tuple(trials))


def spread_out(count: int) -> list[int]:
    """Numbers of a few units from all over a data set of so many."""
    return sorted({round(k * (count - 1) / (2 * RECORDS_PER_PASS - 1)) for k in range(2 * RECORDS_PER_PASS)})


def long_length(units: Sequence[Unit]) -> int:
    """Tokens of an example that is made long: 8 times the longest of these."""
    return 8 * max((_tokens(example) or 1 for unit in units for example in unit), default=1)


def most_tokens_taken(model: torch.nn.Module, units: Sequence[Unit]) -> int | None:
    """The same, or as many tokens as the model has positions for; None for one that does not say."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return min(most, long_length(units)) if isinstance(most, int) else None


def _model_loss(model: Any, batch: Any) -> torch.Tensor:
    args, kwargs = accepted(model, batch)
    return require_loss(model(*args, **kwargs), only=True)


@dataclass(frozen=True)
class PreparedMethod(Method):
    """A method after its preparation: the same policy, without releases of its own.

    Args:
        method: whose policy it is.
        outcome: what the method was prepared with.
    """

    method: Method
    outcome: Outcome
    mechanism: str = "settled"

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """As the method's, whatever the outcome of this run."""
        return self.method.policy(parameters, noise_multiplier, self.outcome)

    def install(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Installed | None:
        return self.method.install(model, optimizer)

    def describe(self) -> dict[str, Any]:
        return self.method.describe()


@dataclass(frozen=True)
class _Release:
    sums: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor]
    policy: Policy


class _Sums(Observer):
    """Keeps the clipped sums as they are before noise, and before they are rounded to the parameters' dtypes."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def before_release(self, accumulator: Accumulator) -> None:
        self.sums = {name: total.detach().clone() for name, total in accumulator.sums.items()}


class _Releases:
    """Runs one private step on a data set and keeps what it released."""

    def __init__(self, start: Start, loss: Callable[[Any, Any], torch.Tensor]):
        self.start, self.loss = start, loss

    def __call__(self, units: Sequence[Unit], *, dropout: bool = False) -> _Release:
        """Release a data set at a fixed seed."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            private = self.start(units)
            try:
                return self._step(private, dropout)
            finally:
                private.detach()

    def _step(self, private: Any, dropout: bool) -> _Release:
        model = private.model
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        seen = _Sums()
        private.observe(seen)
        with nullcontext() if dropout else DropoutDisabled():
            for batch in private.data_loader:
                self.loss(model, batch).backward()
                private.optimizer.step()
        private.optimizer.zero_grad(set_to_none=True)
        rest = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        return _Release(seen.sums, rest, private.method.policy(trained, 1.0, private.outcome))

    def compare(
        self, kind: str, what: str, units: Sequence[Unit], before: _Release | None, allowed: float = 1.0
    ) -> Trial:
        """Release a data set and measure its distance from ``before``, or from a release of nothing.

        The size of one record's own share is measured with dropout, whose masks norms and sums must both see.
        """
        try:
            after = self(units, dropout=before is None)
        except Exception as error:
            return Trial(kind, what, said=f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
        if before is None:
            before = replace(after, sums={name: torch.zeros_like(total) for name, total in after.sums.items()})
        moved, where = _distance(before, after, allowed)
        return Trial(kind, what, moved, where=where)


def _distance(a: _Release, b: _Release, allowed: float) -> tuple[float, dict[str, float]]:
    """Distance of two releases over the sensitivity, and each parameter's share in it."""
    leaked = [name for name in a.rest if not torch.equal(a.rest[name].nan_to_num(), b.rest[name].nan_to_num())]
    if leaked:
        return math.inf, dict.fromkeys(leaked, 1 / len(leaked))
    squares = {}
    for name in a.sums.keys() | b.sums.keys():
        gap = a.sums.get(name, torch.zeros(())).double() - b.sums.get(name, torch.zeros(())).double()
        squares[name] = float((gap / a.policy.std_of(name, gap.device)).square().sum())
    total = sum(squares.values())
    if not math.isfinite(total):
        return math.inf, {name: 1.0 for name, square in squares.items() if not math.isfinite(square)}
    shares = {name: squares[name] / (total or 1.0) for name in sorted(squares, key=squares.__getitem__, reverse=True)}
    return math.sqrt(total) * a.policy.noise_multiplier / allowed, shares


def extremes(record: Any, longest: int) -> Iterator[tuple[str, Any]]:
    """Records made from one of the user's: each with what was done to it.

    Numbers are made huge, tiny, cancelling and non-finite; token sequences long, empty, uniform, unlabelled and all padding;
    texts long and empty. A change that a record has nothing for is left out.
    """
    for what, change in (
        ("a record a million times larger", lambda x: x * 1e6),
        ("a record a millionth as large", lambda x: x * 1e-6),
        ("a record whose tokens cancel", _cancelling),
        ("a record that is not a number", lambda x: x * math.nan),
        ("an infinite record", lambda x: x * math.inf),
        ("a record of zeros", lambda x: x * 0.0),
    ):
        yield from _changed(what, record, functools.partial(_numbers, change))
    tokens = _tokens(record)
    for what, edit in (
        ("a long record", lambda path, x: (x * math.ceil(longest / max(len(x), 1)))[:longest]),
        ("a record of one token", lambda path, x: x[:1]),
        ("an empty record", lambda path, x: x[:0]),
        ("a record of one token again and again", lambda path, x: x[:1] * len(x)),
        ("a record with each token twice", lambda path, x: [t for token in x[: len(x) // 2] for t in (token, token)]),
        ("a record without labels", lambda path, x: [-100] * len(x) if "label" in path else x),
        ("a record of padding alone", lambda path, x: [-100 if "label" in path else 0] * len(x)),
    ):
        yield from _changed(what, record, functools.partial(_sequence, edit, tokens))
    for what, rewrite in (
        ("a long text", lambda text: " ".join([text] * math.ceil(8 * longest / max(len(text), 1)))),
        ("an empty text", lambda text: ""),
        ("a text of one word again and again", lambda text: " ".join(text.split()[:1] * len(text.split()))),
    ):
        yield from _changed(what, record, functools.partial(_text, rewrite))


def _changed(what: str, record: Any, change: Callable[[str, Any], Any]) -> Iterator[tuple[str, Any]]:
    """The record with its parts changed, if any of them is."""
    touched: list[bool] = []

    def noted(path: str, part: Any) -> Any:
        found = change(path, part)
        touched.append(found is not part)
        return found

    changed = _map_parts(noted, record)
    if any(touched):
        yield what, changed


def _map_parts(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """The same nesting of what a function makes of the path and value of each part; a list of numbers is one part."""
    if isinstance(tree, Mapping):
        return {key: _map_parts(function, value, f"{path}.{key}") for key, value in tree.items()}
    if isinstance(tree, tuple) or (isinstance(tree, list) and not all(isinstance(v, (int, float)) for v in tree)):
        found = [_map_parts(function, value, f"{path}.{i}") for i, value in enumerate(tree)]
        return tuple(found) if isinstance(tree, tuple) else found
    return function(path, tree)


def _text(rewrite: Callable[[str], str], path: str, leaf: Any) -> Any:
    return rewrite(leaf) if isinstance(leaf, str) else leaf


def _numbers(change: Callable[[torch.Tensor], torch.Tensor], path: str, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf) if leaf.is_floating_point() and leaf.numel() else leaf
    if isinstance(leaf, list) and any(isinstance(value, float) for value in leaf):
        return change(torch.tensor(leaf)).tolist()
    return leaf


def _cancelling(x: torch.Tensor) -> torch.Tensor:
    x = 1e4 * x
    if x.dim() and x.shape[0] > 1:
        even = x[: 2 * (x.shape[0] // 2) : 2]
        x = x.clone()
        x[1::2] = even + 1e-3 * even.abs().mean()
    return x


def _tokens(record: Any) -> int | None:
    """The length that a record's sequences of whole numbers share; None for a record without any."""
    parts: list[Any] = []
    _map_parts(lambda path, part: parts.append(part), record)
    lengths = [length for length in map(_length, parts) if length is not None]
    return max(set(lengths), key=lengths.count) if lengths else None


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return len(leaf) if leaf.dim() == 1 and not leaf.is_floating_point() else None
    return len(leaf) if isinstance(leaf, list) and all(isinstance(value, int) for value in leaf) else None


def _sequence(edit: Callable[[str, list[int]], list[int]], tokens: int | None, path: str, leaf: Any) -> Any:
    if tokens is None or _length(leaf) != tokens:
        return leaf
    values = leaf.tolist() if isinstance(leaf, torch.Tensor) else leaf
    edited = edit(path, values)
    if edited is values:
        return leaf
    return torch.tensor(edited, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else edited
