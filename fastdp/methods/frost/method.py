"""DP-FROST as settings of the engine: a private selection of partitions, then DP-SGD on those alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

import fastdp.accounting as accounting
import fastdp.ops as ops
from fastdp.accounting.pld import Adjacency
from fastdp.engine.policy import Policy
from fastdp.methods.frost.accumulate import MagnitudeAccumulator
from fastdp.methods.frost.magnitudes import Kind, Magnitude
from fastdp.methods.frost.masked import MaskedPolicy, largest
from fastdp.methods.frost.partitions import Declared, Partition, split
from fastdp.methods.frost.selection import check_ratio, fill, select_partitions
from fastdp.methods.frost.sigma import check_selection, split_budget
from fastdp.private.method import Budget, Method, Outcome, Preparation, Schedule, SideRelease

if TYPE_CHECKING:
    from fastdp.private.run import Private

_KIND = "selection"
_MASK = "mask."


@dataclass(frozen=True)
class DPFrost(Method):
    """Choose partitions by noisy gradient magnitudes, freeze the others, train the chosen ones by DP-SGD (Algorithm 1).

    The selection takes ``selection_steps`` releases of noisy magnitudes before the first step (and again where it is
    repeated); they share the run's budget and stand in its ledger as ``selection``. Partitions that are not chosen get
    ``requires_grad=False`` and leave the optimizer.

    Args:
        unfreezing_ratio: gamma, the largest share of the trained parameters that stays trained, in (0, 1).
        max_grad_norm: the clipping threshold c, of training and of the magnitudes.
        magnitude: ``MG``, ``MGN`` or ``MGNA`` (Definition 8).
        norm_order: alpha of the magnitudes, 1 or 2.
        selection_steps: T; 1 selects at once, without PSEL.
        selection_rate: q_ps, the probability with which an example joins one release of magnitudes.
        gap_coefficient: nu, by how many standard deviations an early choice must stand out.
        estimation_iterations: J of PGM-EST.
        budget_ratio: r_e, training's share of epsilon, in (0, 1).
        select_every: steps after which all partitions are compared anew; None selects once. The paper's K selections over U
            steps are ceil(U / K).
        partitions: names or patterns of parameters by partition; None: each weight with its bias.
        choose_by: ``magnitudes``; or what reads no private data and costs nothing: ``random`` or ``values`` (absolute
            values of the parameters).
        granularity: ``partitions``, or ``parameters`` to choose single entries (the paper's PARAM and, by values, PVAL).
            All weights' gradients are computed then; entries that are not chosen keep their values, unless the
            optimizer decays weights.
        selection_noise_multiplier: sigma_ps given instead of calibrated; needed where `make_private` is given
            noise_multiplier.
        seed: of a random choice, which is public.
        mode: ``sound`` calibrates by PLD; ``paper`` by RDP, as printed, which adds more noise than epsilon asks for.

    Raises ValueError for settings out of range.
    """

    unfreezing_ratio: float = 0.0625
    max_grad_norm: float = 1.0
    magnitude: Kind = "MGNA"
    norm_order: int = 1
    selection_steps: int = 5
    selection_rate: float = 0.02
    gap_coefficient: float = 5.0
    estimation_iterations: int = 1000
    budget_ratio: float = 0.9
    select_every: int | None = None
    partitions: Declared | None = None
    choose_by: Literal["magnitudes", "random", "values"] = "magnitudes"
    granularity: Literal["partitions", "parameters"] = "partitions"
    selection_noise_multiplier: float | None = None
    seed: int = 0
    mode: Literal["sound", "paper"] = "sound"
    mechanism: str = field(default="DP-FROST", init=False)
    freezes: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        Magnitude(self.magnitude, self.norm_order, self.max_grad_norm)
        check_selection(self.budget_ratio, self.selection_steps, self.selection_rate)
        if not 0 < self.unfreezing_ratio < 1:
            raise ValueError(
                f"unfreezing_ratio is {self.unfreezing_ratio}: it must lie between 0 and 1; to train everything use DPSGD"
            )
        for name, choices in (
            ("choose_by", ("magnitudes", "random", "values")),
            ("granularity", ("partitions", "parameters")),
            ("mode", ("sound", "paper")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is '{getattr(self, name)}': choose {' or '.join(choices)}")
        if self.estimation_iterations < 1 or (self.select_every is not None and self.select_every < 1):
            raise ValueError("select_every and estimation_iterations must be at least 1")
        if not self.gap_coefficient >= 0:
            raise ValueError(f"gap_coefficient is {self.gap_coefficient}: it must be 0 or more")
        if self.granularity == "parameters":
            self._check_single_entries()
        given = self.selection_noise_multiplier
        if given is not None and not (given >= 0 and math.isfinite(given)):
            raise ValueError(f"selection_noise_multiplier is {given}: it must be 0 or more")

    def _check_single_entries(self) -> None:
        if self.partitions is not None:
            raise ValueError("single parameters are chosen without partitions: leave partitions out")
        if self.choose_by == "magnitudes" and (self.selection_steps != 1 or self.magnitude != "MGNA"):
            raise ValueError("single parameters are chosen at once by MGNA: set selection_steps=1 and magnitude='MGNA'")

    @property
    def _private(self) -> bool:
        return self.choose_by == "magnitudes"

    def budget(self, schedule: Schedule) -> Budget:
        """ComputeSigma with the run's own number of steps, and K T selection releases.

        Raises ValueError where a noise multiplier is given for training and none for the selection.
        """
        if not self._private:
            return Budget(schedule.multiplier())
        count = self.selection_steps * sum(self.prepares_at(step) for step in range(schedule.steps))
        if self.selection_noise_multiplier is not None:
            if self.selection_noise_multiplier == 0 and math.isfinite(schedule.target_epsilon or math.inf):
                raise ValueError(
                    f"selection_noise_multiplier is 0, at which no selection meets target_epsilon {schedule.target_epsilon:g}: "
                    "raise it, or leave it out to have it calibrated"
                )
            side = self._side(self.selection_noise_multiplier, count)
            return Budget(schedule.multiplier([side]), (side,))
        if schedule.noise_multiplier is not None and schedule.noise_multiplier > 0:
            raise ValueError(
                "with noise_multiplier given, DPFrost needs selection_noise_multiplier as well; or give target_epsilon"
            )
        if schedule.target_epsilon is None or math.isinf(schedule.target_epsilon):
            return Budget(0.0, (self._side(0.0, count),))
        assert schedule.delta is not None
        training, selection = split_budget(
            lambda sigma: schedule.step(sigma).event(schedule.steps),
            lambda sigma: accounting.selection(sigma, count, self.selection_rate),
            schedule.target_epsilon,
            schedule.delta,
            self.budget_ratio,
            "pld" if self.mode == "sound" else "rdp",
            _adjacency(schedule.adjacency),
        )
        return Budget(training, (self._side(selection, count),))

    def _side(self, noise_multiplier: float, count: int) -> SideRelease:
        one = accounting.poisson_gaussian(noise_multiplier, self.selection_rate)
        return SideRelease(_KIND, accounting.EventModel(one), count)

    def prepares_at(self, step: int) -> bool:
        """Before the first step, and every ``select_every`` steps from there (section 5.3)."""
        return step == 0 or (self.select_every is not None and step % self.select_every == 0)

    def split(self, parameters: Mapping[str, torch.Tensor]) -> tuple[Partition, ...]:
        """The partitions of these parameters; raises ValueError if they do not fit them, or none fits the ratio."""
        partitions = split(parameters, self.partitions)
        check_ratio(partitions, self.unfreezing_ratio)
        return partitions

    def prepare(self, preparation: Preparation) -> Outcome:
        """Make the selection.

        Returns for partitions ``iteration``, int64 by partition: which iteration chose it, 0 if it is frozen; and
        ``observed``, the released magnitudes ``[steps, partitions]`` (NaN where a partition was chosen before). For single
        parameters a boolean mask of each, ``mask.NAME``.
        """
        if self.granularity == "parameters":
            masks = largest(self._entry_scores(preparation), self.unfreezing_ratio)
            return {_MASK + name: mask for name, mask in masks.items()}
        partitions = self.split(preparation.parameters)
        if not self._private:
            scores = self._partition_scores(preparation, partitions)
            chosen = fill(scores, partitions, self.unfreezing_ratio)
            return {"iteration": torch.from_numpy(chosen), "observed": torch.tensor([scores], dtype=torch.float64)}
        selected = select_partitions(
            lambda t, remaining: self._observe(preparation, [partitions[i] for i in remaining], t),
            partitions,
            steps=self.selection_steps,
            unfreezing_ratio=self.unfreezing_ratio,
            gap_coefficient=self.gap_coefficient,
            noise_multiplier=_selection_multiplier(preparation),
            selection_rate=self.selection_rate,
            estimation_iterations=self.estimation_iterations,
        )
        return {"iteration": torch.from_numpy(selected.iteration), "observed": torch.from_numpy(selected.observed)}

    def _observe(self, preparation: Preparation, remaining: Sequence[Partition], t: int) -> tuple[np.ndarray, float]:
        """One release: noisy magnitudes of the partitions that remain, and their sensitivity (lines 3 to 8)."""
        sizes = [partition.size for partition in remaining]
        magnitude = self._magnitude
        sensitivity = magnitude.sensitivity(sizes)
        accumulator = self._accumulate(preparation, remaining, check=t == 1)
        noisy = (accumulator.magnitudes() / sensitivity).float()
        self._add_noise(preparation, noisy, t)
        return noisy.double().cpu().numpy() * sensitivity, sensitivity

    @property
    def _magnitude(self) -> Magnitude:
        return Magnitude(self.magnitude, self.norm_order, self.max_grad_norm)

    def _accumulate(
        self, preparation: Preparation, remaining: Sequence[Partition], *, vectors: bool = False, check: bool = True
    ) -> MagnitudeAccumulator:
        """Record the release, and sum over one Poisson sample with everything but ``remaining`` frozen."""
        names = {name for partition in remaining for name in partition.parameters}
        for name, parameter in preparation.parameters.items():
            parameter.requires_grad_(name in names)
        parameters = {name: p for name, p in preparation.parameters.items() if name in names}
        accumulator = MagnitudeAccumulator(parameters, remaining, self._magnitude, vectors=vectors)
        preparation.record(_KIND)
        preparation.differentiate(self.selection_rate, accumulator, check=check)
        return accumulator

    def _add_noise(self, preparation: Preparation, values: torch.Tensor, *position: int) -> None:
        """Noise for a vector in units of its sensitivity."""
        step, tensor = (*position, 0)[:2]
        std = _selection_multiplier(preparation)
        ops.add_noise_(values, std, preparation.stream.at(step, tensor), secure_rounding=preparation.secure_rounding)

    def _entry_scores(self, preparation: Preparation) -> dict[str, torch.Tensor]:
        parameters = preparation.parameters
        if self.choose_by == "values":
            return {name: p.detach().abs() for name, p in parameters.items()}
        if self.choose_by == "random":
            generator = self._generator(preparation)
            return {name: torch.rand(p.shape, generator=generator) for name, p in parameters.items()}
        # As partitions of one entry each: their normalised gradient is the gradient, clipped to c as a whole.
        whole = Partition("all", tuple(parameters), sum(p.numel() for p in parameters.values()))
        sums = self._accumulate(preparation, [whole], vectors=True).sums
        scores = {}
        for index, (name, parameter) in enumerate(parameters.items()):
            score = sums.pop(name, None)
            score = torch.zeros(parameter.shape, device=parameter.device) if score is None else score.contiguous()
            score /= self.max_grad_norm
            self._add_noise(preparation, score, 1, index)
            scores[name] = score
        return scores

    def _partition_scores(self, preparation: Preparation, partitions: Sequence[Partition]) -> list[float]:
        if self.choose_by == "random":
            return torch.rand(len(partitions), generator=self._generator(preparation)).tolist()
        parameters = preparation.parameters
        return [
            sum(float(parameters[name].detach().abs().sum()) for name in partition.parameters) / partition.size
            for partition in partitions
        ]

    def _generator(self, preparation: Preparation) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + preparation.step)

    def chosen(self, parameters: Mapping[str, torch.Tensor], outcome: Outcome) -> dict[str, int]:
        """The partitions that stay trained, each with the iteration that chose it, counted from 1."""
        partitions = split(parameters, self.partitions)
        return {p.name: int(t) for p, t in zip(partitions, outcome["iteration"].tolist()) if t > 0}

    def trained(self, parameters: Mapping[str, torch.nn.Parameter], outcome: Outcome) -> Sequence[str]:
        """Names of the parameters of the chosen partitions."""
        if self.granularity == "parameters":
            return [name for name in parameters if bool(outcome[_MASK + name].any())]
        chosen = zip(split(parameters, self.partitions), outcome["iteration"].tolist())
        names = {name for partition, t in chosen if t > 0 for name in partition.parameters}
        return [name for name in parameters if name in names]

    def policy(
        self, parameters: Mapping[str, torch.nn.Parameter], noise_multiplier: float, outcome: Outcome | None = None
    ) -> Policy:
        """Flat clipping of what is trained; before a selection, of everything.

        Raises ValueError if the partitions do not fit the parameters.
        """
        if not outcome:
            if self.granularity == "partitions":
                self.split(parameters)
        elif self.granularity == "parameters":
            masks = {name: outcome[_MASK + name].to(p.device) for name, p in parameters.items()}
            return MaskedPolicy.of(masks, self.max_grad_norm, noise_multiplier)
        std = noise_multiplier * self.max_grad_norm
        return Policy((self.max_grad_norm,), (std,), dict.fromkeys(parameters, 0))

    def describe(self) -> dict[str, Any]:
        """The settings, for the card."""
        settings = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}
        if isinstance(self.partitions, Mapping):
            settings["partitions"] = {title: list(names) for title, names in self.partitions.items()}
        elif self.partitions is not None:
            settings["partitions"] = [list(names) for names in self.partitions]
        return {"name": self.mechanism, **settings}

    def notes(self, private: Private) -> Sequence[str]:
        """What the selection cost and, in `paper` mode, what its figure is really worth."""
        notes = []
        stated, delta = private.settings["target_epsilon"], private.target_delta
        if not self._private:
            notes.append(f"what is trained was chosen by {self.choose_by}, which reads no private data")
        elif self.mode == "paper" and stated is not None and delta is not None and private.noise_multiplier > 0:
            true = accounting.epsilon(private.ledger.budget_event(), delta, adjacency=private.settings["adjacency"])
            notes.append(
                f"noise calibrated by RDP, as printed: the whole budget costs epsilon {true:.4f}, not the {stated:g} that it "
                "states; the excess noise buys nothing"
            )
        return notes


def _selection_multiplier(preparation: Preparation) -> float:
    """sigma_ps, from the event that the ledger holds."""
    event: Any = next(side.event.one for side in preparation.budget.side if side.kind == _KIND)
    return event.event.noise_multiplier


def _adjacency(name: str) -> Adjacency:
    return "replace_one" if name == "replace_one" else "add_remove"
