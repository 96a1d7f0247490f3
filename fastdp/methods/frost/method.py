"""DP-FROST as settings of the engine: a private selection of partitions, then DP-SGD on those (Algorithm 1)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

import fastdp.accounting as accounting
from fastdp.engine.clip.policy import Policy
from fastdp.methods.frost.accumulate import MagnitudeAccumulator, magnitude_bound
from fastdp.methods.frost.partitions import Declared, Partition, split
from fastdp.methods.frost.selection import PartitionChoice, check_unfreezing_ratio, fill, select_partitions
from fastdp.methods.frost.sigma import check_selection, split_budget
from fastdp.methods.geometry import Groups, check_clipping, clip_groups, describe_clipping
from fastdp.methods.options import Options
from fastdp.methods.removed import replace_removed
from fastdp.private.plan import Budget, Plan, SideRelease
from fastdp.private.preparation import Findings, Outcome, Preparation, Released, RunState
from fastdp.validate import at_least, fraction, integer, one_of

_KIND = "selection"


@replace_removed
@dataclass(frozen=True)
class DPFrost(Options):
    """Choose partitions by noisy gradient magnitudes, freeze the others, train the chosen ones by DP-SGD (Algorithm 1).

    The selection takes ``selection_steps`` releases of noisy magnitudes before the first step (and again where it is
    repeated); they share the run's budget and stand in its ledger as ``selection``. Partitions that are not chosen get
    ``requires_grad=False`` and leave the optimizer.

    Args:
        unfreezing_ratio: gamma, the largest share of the trained parameters that stays trained, in (0, 1).
        max_grad_norm: the clipping threshold c, of training and of the magnitudes.
        selection_steps: T; 1 selects at once, without PSEL.
        selection_rate: q_ps, the probability with which an example joins one release of magnitudes.
        gap_coefficient: nu, by how many standard deviations an early choice must stand out.
        budget_ratio: r_e, training's share of epsilon, in (0, 1).
        select_every: steps after which all partitions are compared anew; None selects once. The paper's K selections over U
            steps are ceil(U / K).
        partitions: names or patterns of parameters by partition; None: each weight with its bias.
        choose_by: ``magnitudes``; or ``random``, which reads no private data and costs nothing.
        selection_noise_multiplier: sigma_ps given instead of calibrated; needed if `make_private` gets noise_multiplier.
        seed: of a random choice, which is public.
        groups: of what is trained, as in `DPSGD`; clipped each on its own. Magnitudes are clipped as a whole.
        adaptive, noise_schedule, clipping_schedule: as in `Options`.
        mode: ``sound`` calibrates by PLD; ``paper`` by RDP, as printed, which adds more noise than epsilon asks for.

    Raises ValueError for settings out of range.
    """

    unfreezing_ratio: float = 0.0625
    max_grad_norm: float = 1.0
    selection_steps: int = 5
    selection_rate: float = 0.02
    gap_coefficient: float = 5.0
    budget_ratio: float = 0.9
    select_every: int | None = None
    partitions: Declared | None = None
    choose_by: Literal["magnitudes", "random"] = "magnitudes"
    selection_noise_multiplier: float | None = None
    seed: int = 0
    mode: Literal["sound", "paper"] = "sound"
    groups: Groups = None
    mechanism: str = field(default="DP-FROST", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clipping(self.max_grad_norm, self.groups)
        check_selection(self.budget_ratio, self.selection_steps, self.selection_rate)
        fraction(unfreezing_ratio=self.unfreezing_ratio)
        one_of(("magnitudes", "random"), choose_by=self.choose_by)
        one_of(("sound", "paper"), mode=self.mode)
        integer(1, select_every=self.select_every)
        at_least(
            0, gap_coefficient=self.gap_coefficient, selection_noise_multiplier=self.selection_noise_multiplier or 0
        )

    @property
    def _private(self) -> bool:
        return self.choose_by == "magnitudes"

    @property
    def takes_losses(self) -> bool:
        return self._private

    def budget(self, plan: Plan) -> Budget:
        """ComputeSigma with the run's own number of steps, and K T selection releases."""
        if not self._private:
            return Budget(plan.multiplier())
        count = self.selection_steps * sum(self.prepares_at(step) for step in range(plan.steps))
        if self.selection_noise_multiplier is not None:
            if self.selection_noise_multiplier == 0 and math.isfinite(plan.target_epsilon or math.inf):
                raise ValueError(
                    f"selection_noise_multiplier is 0, at which no selection meets target_epsilon {plan.target_epsilon:g}: "
                    "raise it, or leave it out to have it calibrated"
                )
            side = self._side(self.selection_noise_multiplier, count)
            return Budget(plan.multiplier([side]), (side,))
        if plan.noise_multiplier is not None and plan.noise_multiplier > 0:
            raise ValueError(
                "with noise_multiplier given, DPFrost needs selection_noise_multiplier as well; or give target_epsilon"
            )
        if plan.target_epsilon is None or math.isinf(plan.target_epsilon):
            return Budget(0.0, (self._side(0.0, count),))
        assert plan.delta is not None
        training, selection = split_budget(
            lambda sigma: plan.step(sigma).event(plan.steps),
            lambda sigma: accounting.dpsgd(sigma, self.selection_rate, count),
            plan.target_epsilon,
            plan.delta,
            self.budget_ratio,
            "pld" if self.mode == "sound" else "rdp",
            plan.adjacency,
        )
        return Budget(training, (self._side(selection, count),))

    def _side(self, noise_multiplier: float, count: int) -> SideRelease:
        return SideRelease(_KIND, noise_multiplier, self.selection_rate, count)

    def prepares_at(self, step: int) -> bool:
        """Before the first step, and every ``select_every`` steps from there (section 5.3)."""
        return step == 0 or (self.select_every is not None and step % self.select_every == 0)

    def split(self, parameters: Mapping[str, torch.Tensor]) -> tuple[Partition, ...]:
        """The partitions of these parameters; raises ValueError if they do not fit them, or none fits the ratio."""
        partitions = split(parameters, self.partitions)
        check_unfreezing_ratio(partitions, self.unfreezing_ratio)
        return partitions

    def prepare(self, preparation: Preparation) -> None:
        """Release magnitudes of partitions as PSEL asks for them."""
        if self._private:
            partitions = self.split(preparation.parameters)
            self._select(partitions, preparation, lambda t, left: self._observe(preparation, left, check=t == 1))

    def conclude(self, findings: Findings) -> Outcome:
        """The selection, from the magnitudes that were released.

        Returns ``iteration``, int64 by partition: which iteration chose it, 0 if it is frozen; and ``observed``, the released
        magnitudes ``[steps, partitions]`` (NaN where a partition was chosen before).
        """
        partitions = self.split(findings.parameters)
        if not self._private:
            generator = torch.Generator().manual_seed(self.seed + findings.step)
            scores = torch.rand(len(partitions), generator=generator).double()
            chosen = fill(scores.tolist(), partitions, self.unfreezing_ratio)
            return {"iteration": torch.from_numpy(chosen), "observed": scores[None]}
        selected = self._select(partitions, findings, lambda t, left: findings.releases[t - 1])
        return {"iteration": torch.from_numpy(selected.iteration), "observed": torch.from_numpy(selected.observed)}

    def _select(
        self, partitions: Sequence[Partition], state: RunState, release: Callable[[int, Sequence[Partition]], Released]
    ) -> PartitionChoice:
        """PSEL over releases of magnitudes in units of their sensitivity (lines 3 to 8)."""

        def observed(t: int, remaining: Sequence[int]) -> tuple[np.ndarray, float]:
            left = [partitions[i] for i in remaining]
            sensitivity = magnitude_bound(left, self.max_grad_norm)
            return release(t, left)["magnitudes"].double().cpu().numpy() * sensitivity, sensitivity

        return select_partitions(
            observed,
            partitions,
            steps=self.selection_steps,
            unfreezing_ratio=self.unfreezing_ratio,
            gap_coefficient=self.gap_coefficient,
            noise_multiplier=state.plan.kind(_KIND).noise_multiplier,
            selection_rate=self.selection_rate,
        )

    def _observe(self, preparation: Preparation, remaining: Sequence[Partition], *, check: bool) -> Released:
        """One release: noisy magnitudes of the partitions that remain, in units of their sensitivity; the others are frozen."""
        sample = preparation.release(_KIND)
        names = {name for partition in remaining for name in partition.parameters}
        for name, parameter in preparation.parameters.items():
            parameter.requires_grad_(name in names)
        parameters = {name: p for name, p in preparation.parameters.items() if name in names}
        accumulator = MagnitudeAccumulator(parameters, remaining, self.max_grad_norm)
        sample.differentiate(accumulator, check=check)
        magnitudes = (accumulator.magnitudes / magnitude_bound(remaining, self.max_grad_norm)).float()
        return sample.publish({"magnitudes": magnitudes}, 1.0)

    def chosen(self, parameters: Mapping[str, torch.Tensor], outcome: Outcome) -> dict[str, int]:
        """The partitions that stay trained, each with the iteration that chose it, counted from 1."""
        partitions = split(parameters, self.partitions)
        return {p.name: int(t) for p, t in zip(partitions, outcome["iteration"].tolist()) if t > 0}

    def trained(self, parameters: Mapping[str, torch.nn.Parameter], outcome: Outcome) -> Sequence[str]:
        chosen = zip(split(parameters, self.partitions), outcome["iteration"].tolist())
        names = {name for partition, t in chosen if t > 0 for name in partition.parameters}
        return [name for name in parameters if name in names]

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """Clipping of what is trained; before a selection, of everything."""
        if not outcome:
            self.split(parameters)
        multiplier = self.gradient_multiplier(noise_multiplier)
        return clip_groups(parameters, multiplier, self.max_grad_norm, self.groups)

    def describe(self) -> dict[str, Any]:
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        settings |= describe_clipping(self.max_grad_norm, self.groups) | self.describe_options()
        if isinstance(self.partitions, Mapping):
            settings["partitions"] = {title: list(names) for title, names in self.partitions.items()}
        elif self.partitions is not None:
            settings["partitions"] = [list(names) for names in self.partitions]
        return {"name": self.mechanism, **settings}

    def notes(self, plan: Plan, ledger: accounting.Ledger) -> Sequence[str]:
        """What the selection cost and, in `paper` mode, what its figure is really worth."""
        stated, delta = plan.target_epsilon, plan.delta
        if not self._private:
            return (f"what is trained was chosen by {self.choose_by}, which reads no private data",)
        if self.mode != "paper" or stated is None or delta is None or plan.sigma == 0:
            return ()
        true = accounting.epsilon(ledger.budget_event(), delta, adjacency=plan.adjacency)
        return (
            f"noise calibrated by RDP, as printed: the whole budget costs epsilon {true:.4f}, not the {stated:g} that it "
            "states; the excess noise buys nothing",
        )
