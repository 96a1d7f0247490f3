"""Held-out curves that may be published: each point is a noised sum of bounded scores, recorded in the run's own ledger."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

import fastdp.accounting as accounting
from fastdp.accounting import Ledger
from fastdp.data import Collator
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.judges import JUDGED, LARGEST_LOSS, noised_means, scores
from fastdp.ops import NoiseStream

KIND = "metrics"
#: Points of a curve: at most twice as many, since they are whole steps apart.
POINTS = 10


class Curves:
    """Loss and accuracy on held-out examples over the steps of a run, with noise.

    The run's epsilon covers training and curves together, as its ledger adds up both: an example may be used for either.

    Attributes:
        multiplier: noise multiplier of one point.
        step_multiplier: noise multiplier that is left for a training step.
    """

    def __init__(self, config: FinetuneConfig, examples: int) -> None:
        """Share the budget out. Raises ConfigError for a run whose training releases are not known beforehand."""
        assert config.private_metrics is not None
        assert config.epsilon is not None
        if config.method != "dpsgd" or config.method_options:
            raise ConfigError(
                "private_metrics goes with method: dpsgd without method_options, whose releases are its steps"
            )
        if config.task not in JUDGED:
            raise ConfigError(f"private_metrics knows {' and '.join(JUDGED)}, not {config.task}")
        self.config = config
        per_epoch = math.ceil(examples / config.batch_size)
        self.total = math.ceil(config.epochs * per_epoch)
        self.every = max(1, self.total // POINTS)
        self.count = sum(map(self.due, range(1, self.total + 1)))
        self.multiplier = accounting.calibrate(
            lambda z: self._event(z).event(self.count), config.private_metrics, config.delta
        )
        sampling: Any = config.sampling
        points = self._event(self.multiplier).event(self.count)
        self.step_multiplier = accounting.calibrate(
            lambda z: accounting.compose(
                accounting.dpsgd(z, config.batch_size / examples, self.total, sampling, per_epoch), points
            ),
            config.epsilon,
            config.delta,
        )
        self.stream = NoiseStream()

    @staticmethod
    def _event(multiplier: float) -> accounting.EventModel:
        return accounting.EventModel(accounting.gaussian(multiplier))

    def declare(self, ledger: Ledger) -> None:
        """Make the points part of a run's ledger. Raises ConfigError if the whole would cost more than the budget."""
        ledger.declare(KIND, self._event(self.multiplier), self.count)
        assert self.config.epsilon is not None
        spent = accounting.epsilon(ledger.budget_event(), self.config.delta)
        if spent > self.config.epsilon:
            raise ConfigError(f"training and curves would cost epsilon {spent:.4f}, more than {self.config.epsilon:g}")

    def due(self, step: int) -> bool:
        """Whether a point belongs after this step, counted from 1."""
        return step % self.every == 0 or step == self.total

    def point(self, ledger: Ledger, model: nn.Module, examples: Any, collator: Collator) -> dict[str, float] | None:
        """Noised loss in nats and, for labels, accuracy; None once the points are spent, as when a resumed run repeats steps."""
        if not ledger.remaining(KIND):
            return None
        ledger.record(KIND)
        own = scores(model, examples, collator, self.config.task, self.config.precision)
        means = noised_means(own, self.multiplier, self.stream)
        return {"held_out_loss": LARGEST_LOSS * means[0], **({"held_out_accuracy": means[1]} if len(means) > 1 else {})}
