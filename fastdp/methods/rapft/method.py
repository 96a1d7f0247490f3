"""Rap-FT as a method of the engine: a mask by relevance, two blocks, and noise shaped by them (algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fastdp.accounting as accounting
from fastdp.engine.clip.policy import Policy
from fastdp.methods.geometry import clip_groups
from fastdp.methods.options import Options
from fastdp.methods.rapft.allocation import (
    ALLOCATIONS,
    effective_noise_multiplier,
    masked_policy,
    printed_noise_multiplier,
)
from fastdp.methods.rapft.axes import axes_of, join_axes, rank_one, second_moments
from fastdp.methods.rapft.initialisation import Initialisation
from fastdp.methods.rapft.masks import check_irrelevance_ratio, check_strong, weak_masks
from fastdp.methods.rapft.relevance import Propagator, first_row, require_values
from fastdp.methods.rapft.rules import Propagation
from fastdp.methods.rapft.sources import MapSource, PrivateSubset, PublicGradients, PublicMap
from fastdp.methods.removed import replace_removed
from fastdp.private.plan import Budget, Plan
from fastdp.private.preparation import Findings, Outcome, Preparation, RunState
from fastdp.validate import integer, one_of, positive

_PRIVATE_MASK = (
    "the mask was computed from private examples without noise: neighbouring data sets then get noise of different "
    "covariances, so that no epsilon holds, whatever the noise (take the mask from PublicMap or NoisyMap)"
)


@replace_removed
@dataclass(frozen=True)
class RapFT(Options):
    """Clipping and noise in two blocks, the strongly and the weakly relevant coordinates.

    Until the first mask exists the steps are those of DP-SGD at the same noise multiplier.

    Args:
        source: of the mask or the axes: `PublicMap` (free), `PublicGradients` (free, for axes), `NoisyMap` (a release, paid
            for out of the budget), or in ``paper`` mode `PrivateSubset` (no guarantee; the default there).
        mode: ``sound``: the run's noise multiplier is that of the whole mechanism. ``paper``: sigma is taken for DP-SGD's, as
            printed, which overstates epsilon; the card gives the true figure too.
        max_grad_norm: C.
        irrelevance_ratio: beta, in (.5, 1].
        allocation: ``printed`` (equations 21 and 22) or ``optimal``; see `allocation.masked_policy`. ``axes``: no
            mask, but an axis for each coordinate (`axes.rank_one`).
        axes_power: how far axes follow relevance, from 0 (even: DP-SGD) to 1.
        propagation, initialisation: how relevance is computed.
        map_after: steps before the first mask. Parameters that start at zero (LoRA's B) have no relevance at step 0.
        map_every: steps between masks; None keeps the first.
        adaptive, noise_schedule, clipping_schedule: as in `Options`.

    Raises ValueError for a setting out of range, and for a mask that would be computed from private data unaccounted for.
    """

    source: MapSource | None = None
    mode: str = "sound"
    max_grad_norm: float = 1.0
    irrelevance_ratio: float = 0.7
    allocation: str = "printed"
    axes_power: float = 0.5
    propagation: Propagation = Propagation()
    initialisation: Initialisation = Initialisation()
    map_after: int = 0
    map_every: int | None = None
    mechanism: str = field(default="Rap-FT", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(("sound", "paper"), mode=self.mode)
        one_of(ALLOCATIONS, allocation=self.allocation)
        check_irrelevance_ratio(self.irrelevance_ratio)
        positive(max_grad_norm=self.max_grad_norm)
        if not 0 <= self.axes_power <= 1:
            raise ValueError(f"axes_power is {self.axes_power}: it must lie between 0, where all axes are even, and 1")
        if isinstance(self.source, PublicGradients) and self.allocation != "axes":
            raise ValueError("PublicGradients say how large gradients are, which makes axes: set allocation='axes'")
        integer(0, map_after=self.map_after)
        integer(1, map_every=self.map_every)
        self._check_source()

    def _check_source(self) -> None:
        if not isinstance(self.source, MapSource | None):
            raise ValueError(
                f"source is a {type(self.source).__name__}: give PublicMap(batches), NoisyMap(noise_multiplier, sample_rate) "
                "or, in paper mode, PrivateSubset(sample_rate)"
            )
        if self.mode == "paper":
            if self.source is None:
                object.__setattr__(self, "source", PrivateSubset())
            if self.allocation != "printed":
                raise ValueError(f"allocation '{self.allocation}' is not the paper's: set mode='sound'")
            return
        if self.source is None or isinstance(self.source, PrivateSubset):
            raise ValueError(
                "a mask computed from private data as they are breaks the guarantee: give source=PublicMap(batches) or "
                "source=NoisyMap(noise_multiplier, sample_rate), or set mode='paper', which guarantees nothing"
            )

    def prepares_at(self, step: int) -> bool:
        """A mask before step ``map_after``, and every ``map_every`` steps from there."""
        since = step - self.map_after
        return since == 0 or (since > 0 and self.map_every is not None and since % self.map_every == 0)

    def budget(self, plan: Plan) -> Budget:
        """The multiplier of a step, and the noised maps; in ``paper`` mode the true multiplier of the printed sigma."""
        assert self.source is not None
        masks = sum(self.prepares_at(step) for step in range(plan.steps))
        if masks == 0:
            raise ValueError(
                f"map_after is {self.map_after} but the run has {plan.steps} steps: no mask would ever be made"
            )
        if plan.unit != "example" and not isinstance(self.source, PublicMap):
            raise ValueError(f"a relevance map has one row a unit, and the unit is {plan.unit}: take it from PublicMap")
        side = self.source.side(masks)
        multiplier = plan.multiplier(side)
        if self.mode == "paper":
            multiplier = effective_noise_multiplier(multiplier, self.irrelevance_ratio)
        return Budget(multiplier, side)

    def try_passes(self, moment: RunState, one: Callable[[], Any]) -> None:
        """The source's pass on one public row, or on one example."""
        row = first_row(self.source.batches[0] if isinstance(self.source, PublicMap) else one())
        if isinstance(self.source, PublicGradients):
            second_moments(moment.model, [row])
        else:
            Propagator(moment.model, moment.parameters, self.propagation, self.initialisation).total(row)

    def prepare(self, preparation: Preparation) -> None:
        assert self.source is not None
        self.source.release(self._propagator(preparation), preparation)

    def conclude(self, findings: Findings) -> Outcome:
        """The mask: relevance, min-max, ranking; True is weak. Of axes rows and columns, one behind the other."""
        assert self.source is not None
        relevance = self.source.relevance(self._propagator(findings), findings)
        if self.allocation == "axes":
            return join_axes(rank_one({name: values.abs() for name, values in relevance.items()}, self.axes_power))
        return weak_masks(relevance, self.irrelevance_ratio)

    def _propagator(self, moment: RunState) -> Propagator:
        if not isinstance(self.source, PublicGradients):
            require_values(moment.parameters)
        return Propagator(moment.model, moment.parameters, self.propagation, self.initialisation, moment.weights)

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """The two blocks of the mask, or DP-SGD while there is none, at the same multiplier."""
        noise_multiplier = self.gradient_multiplier(noise_multiplier)
        chosen = {name: outcome[name].to(p.device) for name, p in parameters.items()} if outcome else {}
        flat = clip_groups(parameters, noise_multiplier, self.max_grad_norm)
        if self.allocation == "axes":
            return replace(flat, axes=axes_of(chosen, parameters))
        if not chosen:
            check_strong((p.numel() for p in parameters.values()), self.irrelevance_ratio)
            return flat
        return masked_policy(
            chosen, allocation=self.allocation, max_grad_norm=self.max_grad_norm, noise_multiplier=noise_multiplier
        )

    def describe(self) -> dict[str, Any]:
        assert self.source is not None
        return {
            "name": self.mechanism,
            "mode": self.mode,
            "max_grad_norm": self.max_grad_norm,
            "irrelevance_ratio": self.irrelevance_ratio,
            "allocation": self.allocation,
            "axes_power": self.axes_power if self.allocation == "axes" else None,
            "mask": self.source.describe(),
            "propagation": vars(self.propagation),
            "initialisation": vars(self.initialisation),
            "map_after": self.map_after,
            "map_every": self.map_every,
            **self.describe_options(),
        }

    def flaws(self) -> Sequence[str]:
        """Why ``paper`` mode with a private mask guarantees nothing."""
        return (_PRIVATE_MASK,) if isinstance(self.source, PrivateSubset) else ()

    def notes(self, plan: Plan, ledger: accounting.Ledger) -> Sequence[str]:
        """In ``paper`` mode, what its own accounting would state, beside the true figure."""
        delta = plan.delta
        if self.mode != "paper" or plan.sigma == 0 or delta is None:
            return ()
        sigma = printed_noise_multiplier(plan.sigma, self.irrelevance_ratio)
        stated = plan.step(sigma).event(ledger.spent_steps)
        epsilons = [
            float(accounting.epsilon(event, delta, adjacency=plan.adjacency)) for event in (stated, ledger.event())
        ]
        return (
            f"the paper accounts for these steps as DP-SGD at noise multiplier {sigma:.6g}, which would state epsilon "
            f"{epsilons[0]:.4g}; for a fixed mask they are one Gaussian mechanism of multiplier "
            f"{plan.sigma:.6g}, whose epsilon is {epsilons[1]:.4g}",
        )
