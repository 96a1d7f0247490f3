"""`fastdp plan`: compare batch sizes by steps, noise, time and memory before a run, and suggest settings.

Noise, steps and noise-to-signal ratios are computed. Time and memory are measured on private steps over invented tokens.
`PlanReport.reasons` states the rule behind each suggestion.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fastdp.accounting as accounting
from fastdp.finetune.config import LABELLED, ConfigError, FinetuneConfig
from fastdp.finetune.machine import Machine, measure
from fastdp.finetune.models import load_tokenizer, load_trained
from fastdp.settings import check

#: Passes over the data beyond which more of them buy little.
MOST_EPOCHS = 10.0
#: Fitted to bench/results/settings.json (made by commit b66b128), runs on E2E and SST-2 by LoRA with a scale of
#: twice the rank and a falling rate: learning rate, bound, rank, and the least steps in which an optimizer converges.
RATE, BOUND = 0.016, 1.0
RANK, SCALE = 8, 2.0
LEAST_STEPS = 18
#: Full fine-tuning was not tried: a twentieth of the rate of adapters is a rule of thumb.
_FULL_RATE = 0.0008


@dataclass(frozen=True)
class Option:
    """One batch size.

    Attributes:
        noise_multiplier: the smallest that the budget allows.
        step_ratio: noise over signal in one step: the norm of the noise over that of a sum of clipped gradients that all agree.
            Real gradients agree less, so it is a lower bound.
        run_ratio: the same ratio for the sum over all steps.
        seconds: predicted time of all steps.
    """

    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    step_ratio: float
    run_ratio: float
    seconds: float


@dataclass(frozen=True)
class PlanReport:
    """The options, the measurements behind them, and the suggested one.

    Attributes:
        config: the suggested settings; `FinetuneConfig.save` writes them for ``fastdp finetune``.
        reasons: why these, rule by rule.
    """

    options: tuple[Option, ...]
    best: Option
    machine: Machine
    trained_parameters: int
    config: FinetuneConfig
    reasons: tuple[str, ...]


def plan(
    config: FinetuneConfig,
    examples: int,
    lengths: int | Sequence[int],
    minutes: float | None = None,
    passes: float = MOST_EPOCHS,
    rows: float = 1.0,
) -> PlanReport:
    """Plan a run of `fastdp finetune` with DP-SGD.

    Args:
        config: the run's settings. Batch size, epochs, learning rate, clipping bound, LoRA rank and alpha are suggested; all
            others are used as given.
        examples: number of examples in the training data; of people, if ``user_column`` protects people.
        lengths: of examples, in tokens: one number if all are alike, or quantiles at equal distances, such as shortest, median
            and longest.
        minutes: time limit for the steps.
        passes: most passes over the data.
        rows: average number of rows of a person.

    Raises:
        ConfigError: for settings that do not hold, a model that cannot be loaded, or a time too short for `LEAST_STEPS`.
    """
    lengths = (lengths,) if isinstance(lengths, int) else tuple(sorted(lengths))
    _check(config, examples, lengths, minutes, passes)
    tokenizer = load_tokenizer(config)
    model = load_trained(config, tokenizer)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    machine = measure(model, tokenizer, config, lengths)
    batches = _batches(examples)
    if rows > 1:
        # A step runs every row of its people.
        machine = dataclasses.replace(machine, rows=rows)
    options = tuple(_option(config, examples, batch, trained, machine, minutes, passes) for batch in batches)
    best = _suggested(options, machine, minutes)
    adapts = config.peft in ("lora", "dora")
    settings: dict[str, Any] = {
        "batch_size": best.batch_size,
        "epochs": best.epochs,
        "learning_rate": _FULL_RATE if config.peft == "full" else RATE,
        "schedule": "linear",
        "max_grad_norm": BOUND,
        **({"lora_r": RANK, "lora_alpha": SCALE * RANK} if adapts else {}),
    }
    within = "" if minutes is None else f" within {minutes:g} minutes"
    reasons = (
        f"batch {best.batch_size}: the least noise over signal of the sizes that leave {LEAST_STEPS} steps or more{within}; that "
        "noise over batch size decides at a given budget is a scaling law of private training (arXiv 2501.18914), and the least "
        "number of steps is fitted",
        f"learning rate {settings['learning_rate']:.2g}, bound {BOUND:g}"
        + (f", rank {RANK} and alpha {SCALE * RANK:g}" if adapts else "")
        + ": fitted to runs on E2E and SST-2 (bench/results/settings.json)",
    )
    return PlanReport(options, best, machine, trained, dataclasses.replace(config, **settings), reasons)


def _check(config: FinetuneConfig, examples: int, lengths: Sequence[int], minutes: float | None, passes: float) -> None:
    check(config, ConfigError)
    unit = "people" if config.user_column else "examples"
    if config.epsilon is None or math.isinf(config.epsilon):
        raise ConfigError(f"epsilon is {config.epsilon or 'missing'}: a plan needs a budget, such as 8")
    if examples < 2 * LEAST_STEPS:
        raise ConfigError(f"{examples} {unit} are too few to plan for: give at least {2 * LEAST_STEPS}")
    if config.delta >= 1 / examples:
        raise ConfigError(f"delta is {config.delta:g}: it must lie between 0 and 1 / {examples} {unit}")
    if config.method == "dpzo":
        raise ConfigError("a plan measures steps of dpsgd, and dpzo's need other settings: leave method out")
    if not lengths or min(lengths) < 1:
        raise ConfigError(f"length is {', '.join(map(str, lengths)) or 'empty'}: examples have at least 1 token")
    for name, value in (("minutes", minutes), ("passes", passes)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name} is {value}: it must be greater than 0")


def _batches(examples: int) -> list[int]:
    sizes = (2**k for k in itertools.count(4))
    return list(itertools.takewhile(lambda size: size <= examples // 3, sizes)) or [examples // 3]


def _option(
    config: FinetuneConfig,
    examples: int,
    batch: int,
    trained: int,
    machine: Machine,
    minutes: float | None,
    passes: float,
) -> Option:
    per_epoch = math.ceil(examples / batch)
    epochs = passes
    if minutes is not None:
        left = 60 * minutes - machine.once_seconds(batch, math.ceil(passes * per_epoch))
        epochs = min(epochs, left / (per_epoch * machine.step_seconds(batch)))
    # Round to tenths of a pass, at least one; the table shows what does not fit in the time.
    epochs = max(math.floor(10 * epochs) / 10, 0.1)
    steps = max(1, math.ceil(epochs * per_epoch))
    assert config.epsilon is not None
    noise = accounting.calibrate(
        lambda z: accounting.dpsgd(z, batch / examples, steps), config.epsilon, config.delta, tolerance=3e-3
    )
    ratio = noise * math.sqrt(trained) / batch
    return Option(batch, epochs, steps, noise, ratio, ratio / math.sqrt(steps), machine.seconds(batch, steps))


def _suggested(options: Sequence[Option], machine: Machine, minutes: float | None) -> Option:
    fitting = [
        option
        for option in options
        if option.steps >= LEAST_STEPS and (minutes is None or option.seconds <= 60 * minutes * 1.01)
    ]
    if not fitting and minutes is None:
        raise ConfigError(
            f"so few passes make less than {LEAST_STEPS} steps even of the smallest batch: allow more passes"
        )
    if not fitting:
        least = min(machine.seconds(option.batch_size, LEAST_STEPS) for option in options)
        raise ConfigError(
            f"{minutes:g} minutes are too short: {LEAST_STEPS} steps of the smallest batch take {least / 60:.3g}; give more time"
        )
    return min(fitting, key=lambda option: option.run_ratio)


def with_invented_labels(config: FinetuneConfig) -> FinetuneConfig:
    """Fill in labels where the task needs some; a plan only measures, so any will do."""
    return dataclasses.replace(config, labels=config.labels or ["no", "yes"]) if config.task in LABELLED else config
