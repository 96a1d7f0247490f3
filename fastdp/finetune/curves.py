"""Held-out curves that may be shown: each point a sum of bounded scores with noise, paid from the run's own ledger."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fastdp.accounting as accounting
from fastdp.accounting import Ledger
from fastdp.data import IGNORED, Collator
from fastdp.finetune.config import ConfigError, FinetuneConfig
from fastdp.finetune.evaluation import predict
from fastdp.ops import NoiseStream, add_noise_

KIND = "metrics"
#: Points of a curve, about.
POINTS = 10
#: In nats; a larger loss of one example counts as this.
LARGEST_LOSS = 10.0


class Curves:
    """Loss and accuracy on held-out examples over the steps of a run, with noise.

    One budget holds for training and curves together, whether an example is trained on or judges: the ledger adds up both.

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
        if config.task not in ("causal-lm", "classification"):
            raise ConfigError(f"private_metrics knows causal-lm and classification, not {config.task}")
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
        """Loss in nats and, of labels, accuracy: both noised; None once the points are spent, as after steps made twice."""
        if not ledger.remaining(KIND):
            return None
        ledger.record(KIND)
        scores = self._scores(model, examples, collator)
        total = scores.sum(0).to(torch.float32)
        # Each score lies in [0, 1], so that one example moves the vector by at most the root of their number.
        add_noise_(total, self.multiplier * math.sqrt(len(total)), self.stream)
        means = (total / len(examples)).tolist()
        return {"held_out_loss": LARGEST_LOSS * means[0], **({"held_out_accuracy": means[1]} if len(means) > 1 else {})}

    def _scores(self, model: nn.Module, examples: Any, collator: Collator) -> Tensor:
        """[examples, 1 or 2], each in [0, 1]: the loss over its largest, and whether the label is right."""
        config, device = self.config, next(model.parameters()).device
        was_training = model.training
        model.eval()
        rows = []
        try:
            with torch.inference_mode():
                for start in range(0, len(examples), config.eval_batch_size):
                    batch = collator(
                        [examples[i] for i in range(start, min(start + config.eval_batch_size, len(examples)))]
                    )
                    logits, labels = predict(model, batch, config.task, config.precision, device)
                    rows.append(_bounded(logits, labels))
        finally:
            model.train(was_training)
        return torch.cat(rows)


def _bounded(logits: Tensor, labels: Tensor) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", ignore_index=IGNORED)
    known = (labels != IGNORED).double()
    means = (losses.view_as(labels).double() * known).reshape(len(labels), -1).sum(1)
    means = means / known.reshape(len(labels), -1).sum(1).clamp(min=1)
    # What is not a number counts as the largest loss: it must not pass the bound.
    scores = [means.nan_to_num(nan=LARGEST_LOSS, posinf=LARGEST_LOSS).clamp(0, LARGEST_LOSS) / LARGEST_LOSS]
    if labels.dim() == 1:
        scores.append((logits.argmax(-1) == labels).double())
    return torch.stack(scores, 1).cpu()
