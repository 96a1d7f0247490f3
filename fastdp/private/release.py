"""The one place where something leaves the private side: ledger first, then noise, then `.grad` or the parameter itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

import fastdp.distributed.pieces as pieces
import fastdp.ops as ops
from fastdp.accounting.ledger import Ledger
from fastdp.calls.pending import users_hooks
from fastdp.distributed.ranks import Ranks
from fastdp.engine.clip.axes import RankOne
from fastdp.engine.clip.policy import Policy
from fastdp.ops.stream import NoiseStream


class ClippedSums(NamedTuple):
    """Parameters with their clipped sums, the noise that each sum is due, and the tensor id of that noise.

    Where one has ``axes``, its sum and noise are of the gradient over them. A step has hundreds of parameters, so that they come
    as columns.
    """

    parameters: Sequence[torch.nn.Parameter]
    totals: Sequence[torch.Tensor]
    stds: Sequence[float]
    tensor_ids: Sequence[int]
    axes: Sequence[RankOne | None]


class Update(Protocol):
    """An optimizer's own step on ``(total + std z) / divisor``, times the axes; which need not make that gradient."""

    def __call__(
        self,
        summed: ClippedSums,
        take: Callable[[Sequence[int]], torch.Tensor],
        *,
        divisor: float,
        secure_rounding: bool,
    ) -> Sequence[int]:
        """Update the parameters it can, all together; returns the places of those that need their gradients, left as they were.

        ``take`` claims the noise of tensor ids: int32 [k, 12].
        """


class ReplicatedLedger:
    """A ledger that several processes release under: the first writes, and the others' mirrors count along once it has."""

    def __init__(self, ledger: Ledger, ranks: Ranks):
        self.ledger, self.ranks = ledger, ranks

    def record(self, kind: str = "step") -> None:
        """Note one release on disk before any rank makes it; what fails on the first rank fails on all.

        A release that was reserved before ranks last met is on disk, and nothing is exchanged.
        """
        if self.ledger.holds_next(kind):
            self.ledger.record(kind)
        elif self.ranks.leads:
            self.ranks.first(lambda: self.ledger.record(kind))
        else:
            self.ranks.first(lambda: None)
            self.ledger.record(kind)


class Release:
    """Turns the clipped sums of a logical batch into noisy mean gradients.

    Args:
        parameters: the trained ones; all of them receive noise, whether or not a gradient reached them.
        stream: tensor i of release s takes position (s, i), whatever the number of threads or microbatches.
        expected_batch_size: the divisor, which does not depend on the batch that was drawn.
        secure_rounding: round noised sums to a grid, exactly (docs/noise.md).
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        ledger: Ledger | ReplicatedLedger,
        stream: NoiseStream,
        expected_batch_size: float,
        *,
        secure_rounding: bool = True,
    ):
        self.parameters = dict[str, torch.nn.Parameter]()
        self.ledger = ledger
        self.stream = stream
        self.expected_batch_size = expected_batch_size
        self.secure_rounding = secure_rounding
        self._tensors: dict[str, int] = {}
        self._cut: frozenset[str] = frozenset()
        self.include(parameters)
        self._count = 0

    def include(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Release gradients of these parameters too, from here on, with noise at positions of their own."""
        self.parameters = {**self.parameters, **parameters}
        self._tensors |= {name: len(self._tensors) + index for index, name in enumerate(parameters)}
        self._cut |= {name for name, parameter in parameters.items() if pieces.is_dtensor(parameter)}

    def __call__(
        self,
        sums: dict[str, torch.Tensor],
        policy: Policy,
        *,
        update: Update | None = None,
        aliased: Collection[str] = (),
    ) -> None:
        """Record, add noise and set `.grad`, rounded to the parameter's dtype only after the noise is in.

        Parameters that were frozen later on get no gradient: their sums are let go of.
        Hooks that the user registered on a parameter are called with its released gradient.
        ``update`` takes the parameters it can; their `.grad` stays None. ``sums`` is emptied: each other buffer becomes a
        gradient, or a copy of those ``aliased`` does, which are to be written to again, without noise.
        """
        self.ledger.record()
        names = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        if update is not None:
            names = self._update_parameters(names, sums, policy, update)
        totals = dict(zip(names, self._totals(names, sums)))
        totals |= {name: totals[name].clone() for name in names if name in aliased}
        self._add_noise(totals, policy)
        uneven = {name: axes for name, axes in policy.axes.items() if not axes.even}
        even = [total for name, total in totals.items() if name not in uneven]
        if even:
            torch._foreach_div_(even, self.expected_batch_size)
        hooks = users_hooks(self.parameters)
        for name in names:
            parameter, total = self.parameters[name], totals.pop(name)
            if name in uneven:
                axes = uneven[name]
                axes.along(total, pieces.part(axes.rows, parameter) / self.expected_batch_size)
            total = total.to(parameter.dtype)
            parameter.grad = pieces.from_piece(total, parameter) if name in self._cut else total
            for hook in hooks.get(name, ()):
                changed = hook(parameter.grad)
                parameter.grad = parameter.grad if changed is None else changed
        sums.clear()
        self._count += 1

    def _totals(self, names: Sequence[str], sums: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The sums of parameters, contiguous, taken out of ``sums``; zeros where nothing was added."""
        return [
            torch.zeros_like(pieces.to_local(self.parameters[name]), dtype=torch.float32)
            if total is None
            # A model in float64 has sums of its own type.
            else total.float().contiguous()
            for name, total in zip(names, map(sums.pop, names, itertools.repeat(None)))
        ]

    def _update_parameters(
        self, every: Sequence[str], sums: dict[str, torch.Tensor], policy: Policy, update: Update
    ) -> list[str]:
        """Names of the parameters that an optimizer's own step leaves to us; the sums of others are gone."""
        kept = policy.masks.keys() | users_hooks(self.parameters).keys()
        names = [name for name in every if name not in kept]
        parameters = [self.parameters[name] for name in names]
        totals = self._totals(names, sums)
        stds, groups = policy.stds or (0.0,), map(policy.group_of.get, names, itertools.repeat(0))
        summed = ClippedSums(
            parameters,
            totals,
            [stds[group] for group in groups],  # type: ignore[index]
            [self._tensors[name] for name in names],
            [policy.axes.get(name) for name in names] if policy.axes else [None] * len(names),
        )
        left = update(
            summed,
            lambda tensors: self.stream.take_at(self._count, tensors),
            divisor=self.expected_batch_size,
            secure_rounding=self.secure_rounding,
        )
        sums.update({names[at]: totals[at] for at in left})
        return [name for name in every if name in kept] + [names[at] for at in left]

    def _add_noise(self, totals: Mapping[str, torch.Tensor], policy: Policy) -> None:
        stds, groups = policy.stds or (0.0,), policy.group_of
        due = [name for name in totals if name not in policy.masks and stds[groups.get(name, 0)] > 0]  # type: ignore[index]
        if due:
            ops.add_noise_group_(
                [totals[name] for name in due],
                [stds[groups.get(name, 0)] for name in due],  # type: ignore[index]
                self.stream.take_at(self._count, [self._tensors[name] for name in due]),
                secure_rounding=self.secure_rounding,
                firsts=[pieces.first(self.parameters[name]) if name in self._cut else 0 for name in due],
            )
        for name in totals.keys() & policy.masks.keys():
            # Each side's noised sum lies on a grid of its own: both are drawn whole, and each gives the elements it has.
            parameter, total, sides, index = self.parameters[name], totals[name], groups[name], self._tensors[name]
            assert isinstance(sides, tuple)
            outside, start = total.clone(), pieces.first(parameter)
            self._draw(total, stds[sides[0]], index, start)
            self._draw(outside, stds[sides[1]], index + len(self._tensors), start)
            torch.where(pieces.part(policy.masks[name], parameter), total, outside, out=total)

    def _draw(self, total: torch.Tensor, std: float, index: int, start: int) -> None:
        draw = self.stream.at(self._count, index)
        ops.add_noise_(total, std, draw, secure_rounding=self.secure_rounding, first=start)
