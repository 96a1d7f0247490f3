"""What a method may do with the private data besides training: releases, each of which is paid for before its data are seen.

A method's `prepare` makes them and returns nothing; its `conclude` turns what was released into an outcome, and is handed
nothing else. So an outcome cannot hold what no noise was added to, unless a method goes behind its own back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import fastdp.ops as ops
from fastdp.calls.batches import accepted, as_long_as, map_tensors, take_rows
from fastdp.calls.collation import Collation, example_length, spread_indices
from fastdp.distributed.ranks import ONE, Ranks
from fastdp.distributed.shards import UnshardedParameters
from fastdp.engine.bounds import Errors, Norms
from fastdp.engine.clip.accumulator import Accumulator
from fastdp.engine.engine import Engine
from fastdp.engine.errors import SelfCheckError
from fastdp.engine.loss.boundary import require_loss
from fastdp.ops.stream import NoiseStream
from fastdp.private.criterion import Criterion, mean_of_rows
from fastdp.private.loader import PrivateLoader
from fastdp.private.plan import Plan, SideRelease
from fastdp.verify import Checks

#: What came out of a method's preparation, by name: masks, a selection. It follows from what was released, so it may be saved.
Outcome = Mapping[str, torch.Tensor]
#: A batch -> per-unit tensors ``[units, ...]`` by name, all of a batch's units at once or in several parts.
Contributions = Callable[[Any], Iterator[Mapping[str, torch.Tensor]]]


#: Examples of the batch and of the data set among which the longest and the shortest are compared.
_SAMPLED = 4
#: How far what an example contributes may move beside a longer one, relative to its size: rounding of other shapes.
_TOLERANCE = 1e-2
_PADDED = (
    "padding changes what an example contributes to this release, and nothing was released. Pad on the right, or give "
    "position_ids"
)
_COUPLED = (
    "the model couples examples, or lets one that is not finite reach others: one contributes otherwise alone. Nothing was "
    "released"
)


class Released(Mapping[str, torch.Tensor]):
    """Tensors with their noise; each look at one is a copy, so that none can be changed afterwards."""

    def __init__(self, values: Mapping[str, torch.Tensor]):
        self._values = dict(values)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name].clone()

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass
class RunState:
    """Where a run stands between two logical batches.

    Attributes:
        plan: what is public about the run.
        model: in the state that training has reached, with its plain forward passes.
        parameters: every parameter that may be trained, by name, the frozen ones included.
        step: logical steps done.
        outcome: what the previous preparation came to; empty at the first.
        weights: how passes through the model get at its weights; passes that ranks do not make alike, within its `apart`.
    """

    plan: Plan
    model: torch.nn.Module
    parameters: Mapping[str, torch.nn.Parameter]
    step: int
    outcome: Outcome
    weights: UnshardedParameters = field(default_factory=UnshardedParameters)


@dataclass
class Findings(RunState):
    """What an outcome may be drawn from.

    Attributes:
        releases: what was released, in order.
    """

    releases: Sequence[Released] = ()


@dataclass(frozen=True)
class Access:
    """What makes releases possible. The run's own; methods are handed a `Preparation`.

    Attributes:
        record: notes one release of a kind in the ledger.
        open_loader: draws one sample for a kind.
        stream: noise for one preparation alone.
        secure_rounding: whether noised sums are rounded to a grid, exactly.
        reduction, criterion: how losses are made outside the model; None if it returns its loss.
        open_unprotected: draws at a rate for what gets no noise; None where the run claims to be private.
        ranks: the processes over whose shares of a sample its sums run.
    """

    record: Callable[[str], None]
    open_loader: Callable[[str], PrivateLoader]
    stream: NoiseStream
    secure_rounding: bool = True
    reduction: str | None = None
    criterion: Criterion | None = None
    open_unprotected: Callable[[float], PrivateLoader] | None = None
    ranks: Ranks = ONE


class Preparation(RunState):
    """What a method's `prepare` may use: the model, and `release`."""

    def __init__(self, state: RunState, access: Access):
        super().__init__(**vars(state))
        self._access = access
        self._releases: list[Released] = []
        self._over = False

    def release(self, kind: str) -> Sample:
        """Pay for one release of a declared kind: the sample that its event says, and the noise that goes over it.

        Raises:
            ValueError: for a kind that the method's budget does not declare.
            BudgetExceeded: where the budget does not hold another.
            RuntimeError: after the preparation.
        """
        self.require_open()
        side = self.plan.kind(kind)
        self._access.record(kind)
        self._releases.append(Released({}))
        return Sample(self, self._access, side, self._releases)

    def unprotected(self, rate: float, contributions: Contributions) -> Released:
        """The sum of ``contributions`` over one Poisson sample at ``rate``, without noise: for methods as printed.

        Raises ValueError for a method that does not state, in its `flaws`, why it guarantees nothing.
        """
        self.require_open()
        if self._access.open_unprotected is None:
            raise ValueError(
                "private data are read without noise only by a method that says in its flaws() why it guarantees nothing"
            )
        total: dict[str, torch.Tensor] = {}
        loader = self._access.open_unprotected(rate)
        with self.weights.apart():
            for part in _parts(loader, self.parameters, contributions):
                for name, values in part.items():
                    total[name] = total[name] + values.sum(0) if name in total else values.sum(0)
        self._releases.append(Released(self._access.ranks.total(total)))
        return self._releases[-1]

    def findings(self) -> Findings:
        """End the preparation; what it released."""
        self.end()
        state = (self.plan, self.model, self.parameters, self.step, self.outcome, self.weights)
        return Findings(*state, tuple(self._releases))

    def end(self) -> None:
        """From here on nothing is released."""
        self._over = True

    def require_open(self) -> None:
        """Raise RuntimeError once the preparation is over."""
        if self._over:
            raise RuntimeError("this preparation is over: releases belong into the method's prepare")


class Sample:
    """One release that is paid for: one pass over the units that were drawn for it, then one sum with its noise.

    Either `total` does both, and clips; or `differentiate` fills an accumulator, and `publish` adds the noise.
    """

    def __init__(self, preparation: Preparation, access: Access, side: SideRelease, releases: list[Released]):
        self.side = side
        self._preparation, self._access = preparation, access
        self._releases, self._index = releases, len(releases) - 1
        self._drawn = self._published = False

    def total(self, contributions: Contributions, max_norm: float, like: Mapping[str, torch.Tensor]) -> Released:
        """The noised sum of the units' contributions, each scaled to L2 norm at most ``max_norm`` over all names together.

        One that is not finite counts as 0.

        Args:
            contributions: called with each batch of the sample.
            like: tensors of the sums' shapes and devices, by name.

        Raises ValueError where the contributions are not one a unit.
        """
        sums = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in like.items()}
        loader = self._draw()
        with self._preparation.weights.apart():
            for part in _parts(loader, self._preparation.parameters, contributions):
                add_clipped(sums, part, max_norm)
        self._access.ranks.add(sums, like)
        return self.publish(sums, max_norm)

    def differentiate(self, accumulator: Accumulator, *, check: bool = True) -> None:
        """Run the per-example engine over the sample, into ``accumulator``.

        ``check`` may be off where an earlier sample was checked with these parameters, or more of them.

        Raises ValueError if neither the model nor a criterion gives losses.
        """
        loader = self._draw()
        model = self._preparation.model
        engine = Engine(
            model,
            accumulator.policy,
            loader.tickets,
            loss_reduction=self._access.reduction,
            accumulator=accumulator,
            verify=partial(Checks, enabled=check),
            keep_logits=True,
            ranks=self._access.ranks,
            secret=not loader.reproducible,
        )
        try:
            for batch in loader:
                batch, rows = _to_device(batch, self._preparation.parameters), loader.tickets[0].rows
                args, kwargs = accepted(model, batch)
                output, criterion = model(*args, **kwargs), self._access.criterion
                if criterion is None:
                    loss = require_loss(output, only=True)
                else:
                    loss = mean_of_rows(criterion(output, batch), rows)
                loss.backward()
            with engine.synchronized():
                pass
            accumulator.merge(self._access.ranks)
        finally:
            engine.close()

    def publish(self, values: Mapping[str, torch.Tensor], sensitivity: float) -> Released:
        """``values`` with the noise of this release's event: what one unit moves all of them by is at most ``sensitivity``.

        Raises:
            RuntimeError: if it is called again: the noise is for one release.
            ValueError: for a sensitivity that is not positive, or values that are not finite and so know none.
        """
        self._preparation.require_open()
        if self._published:
            raise RuntimeError("this release was made already: each costs anew, so ask for another")
        if not (sensitivity > 0 and math.isfinite(sensitivity)):
            raise ValueError(f"the sensitivity of a release is {sensitivity}: it must be positive and finite")
        self._drawn = self._published = True
        noised = {}
        for index, (name, tensor) in enumerate(values.items()):
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} is not finite, so that no noise protects it: leave such units out of the sum")
            # A copy: what the method still holds is without noise, and must not become what was released.
            noised[name] = tensor.detach().float().clone(memory_format=torch.contiguous_format)
            if self.side.noise_multiplier > 0:
                std = self.side.noise_multiplier * sensitivity
                draw = self._access.stream.at(self._index, index)
                ops.add_noise_(noised[name], std, draw, secure_rounding=self._access.secure_rounding)
        self._releases[self._index] = Released(noised)
        return self._releases[self._index]

    def _draw(self) -> PrivateLoader:
        self._preparation.require_open()
        if self._drawn:
            raise RuntimeError("this release has drawn its sample already: another sample is another release")
        self._drawn = True
        return self._access.open_loader(self.side.kind)


def add_clipped(total: dict[str, torch.Tensor], parts: Mapping[str, torch.Tensor], max_norm: float) -> None:
    """Add each unit's tensors ``[units, *shape]``, scaled to L2 norm at most ``max_norm`` over all names together, in place.

    One unit more or less moves ``total`` by at most ``max_norm``.
    """
    first = next(iter(parts.values()))
    norms = Norms(1, first.shape[0], first.device)
    for values in parts.values():
        entries = values[0].numel()
        norms.add(0, ops.instance_sqnorm(values), Errors(entries, ops.Rounding(values).squares(entries)))
    scales = norms.upper().weights((max_norm,))[0]
    for name, values in parts.items():
        total[name] += ops.instance_sum(values, scales)


def _parts(
    loader: PrivateLoader, parameters: Mapping[str, torch.nn.Parameter], contributions: Contributions
) -> Iterator[Mapping[str, torch.Tensor]]:
    """The contributions of a sample's units, the padding row of an empty one left out; two of each batch are taken alone too."""
    checked = False
    for batch in loader:
        ticket = loader.tickets.popleft()
        weights = ticket.weights
        if not bool((weights > 0).all()):
            continue
        if not checked:
            _require_independence(ticket.source, parameters, contributions)
        found, units, placed = 0, weights.shape[0], _to_device(batch, parameters)
        drawn = [] if checked or units < 2 else random.SystemRandom().sample(range(units), 2)
        for part in contributions(placed):
            counts = {tensor.shape[0] for tensor in part.values()}
            before, found = found, found + max(counts)
            if len(counts) > 1 or found > units:
                break
            for own in drawn:
                if before <= own < found:
                    alone = take_rows(placed, torch.tensor([own]), as_long_as(placed, units))
                    here = {name: tensor[own - before] for name, tensor in part.items()}
                    _require_same(here, _first(contributions(alone)), _COUPLED)
            yield part
        checked = True
        if found != units:
            raise ValueError(
                f"a batch of {units} units gave another number of contributions: this release needs one row a "
                "unit, not users or packed rows"
            )


def _require_independence(
    source: Collation | None, parameters: Mapping[str, torch.nn.Parameter], contributions: Contributions
) -> None:
    """Raise `SelfCheckError` if an example contributes otherwise when it is collated beside a longer one."""
    if source is None:
        return
    spread = spread_indices(len(source.dataset), _SAMPLED)
    items = [source.dataset[index] for index in dict.fromkeys([*source.indices[:_SAMPLED], *spread])]
    longest, shortest = max(items, key=example_length), min(items, key=example_length)
    beside, alone = (
        _first(contributions(_to_device(source.collated(chosen), parameters)))
        for chosen in ([shortest, longest], [shortest])
    )
    _require_same(beside, alone, _PADDED)


def _first(parts: Iterator[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    return {name: tensor[0] for name, tensor in next(parts).items()}


def _require_same(one: Mapping[str, torch.Tensor], alone: Mapping[str, torch.Tensor], otherwise: str) -> None:
    """Raise `SelfCheckError` if what a unit contributes is another alone, and finite there."""
    size = sum(float(t.double().square().sum()) for t in alone.values()) ** 0.5
    gap = sum(float((one[n].double() - alone[n].double()).square().sum()) for n in alone) ** 0.5
    if math.isfinite(size) and not gap <= _TOLERANCE * size:
        raise SelfCheckError(otherwise)


def _to_device(batch: Any, parameters: Mapping[str, torch.nn.Parameter]) -> Any:
    device = next(iter(parameters.values())).device
    return map_tensors(batch, lambda tensor: tensor.to(device))
