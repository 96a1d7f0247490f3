"""What a run would take and be worth, before it is run: for each batch size steps, noise, time and memory, and a suggestion.

Noise, steps and noise-to-signal ratios are computed. Time and memory are those of private steps on invented tokens, run on this
machine, or simulated for a GPU. What is suggested follows three rules, which `Plan.reasons` says apart.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fastdp
import fastdp.accounting as accounting
from fastdp.data import Collator
from fastdp.finetune.config import LABELLED, ConfigError, FinetuneConfig
from fastdp.finetune.evaluation import autocast
from fastdp.finetune.memory import PeakMemory
from fastdp.finetune.models import load_tokenizer, load_trained
from fastdp.finetune.tasks import invented_label

#: Fewer steps than this leave an optimizer no time to arrive, whatever the noise.
LEAST_STEPS = 30
#: Passes over the data beyond which more of them buy little.
MOST_EPOCHS = 10.0
#: Steps times learning rate of the runs that `docs/results.md` tells of: E2E and SST-2 by LoRA, on a falling schedule.
_MOVEMENT = 0.23
_RATES = {"lora": (5e-4, 1e-2), "dora": (5e-4, 1e-2), "full": (2e-5, 1e-3)}
_SCALE = 8.0
_RANKS = ((0.5, 16), (1.0, 8), (2.0, 4), (math.inf, 2))


@dataclass(frozen=True)
class Machine:
    """What private steps take.

    Attributes:
        example_seconds: of forward and backward, for one example.
        release_seconds: of noise and update, once a step.
        peak_bytes: with ``physical`` examples in memory at once.
        where: in words; says so where it is simulated.
    """

    example_seconds: float
    release_seconds: float
    peak_bytes: int
    physical: int
    where: str

    def seconds(self, batch_size: int, steps: int) -> float:
        """Of a run's steps."""
        return steps * (self.release_seconds + batch_size * self.example_seconds)


@dataclass(frozen=True)
class Option:
    """One batch size.

    Attributes:
        noise_multiplier: that the budget allows.
        step_ratio: noise over signal in one step: the norm of the noise over that of a sum of gradients which all agree and are
            all clipped. Real gradients agree less, so that it is a lower bound.
        run_ratio: the same of the sum over all steps.
        seconds: of all steps.
    """

    batch_size: int
    epochs: float
    steps: int
    noise_multiplier: float
    step_ratio: float
    run_ratio: float
    seconds: float


@dataclass(frozen=True)
class Plan:
    """Options, what they rest on, and which one is suggested.

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
    length: int,
    minutes: float | None = None,
    gpu: str | None = None,
) -> Plan:
    """Plan a run of `fastdp finetune` with DP-SGD.

    Args:
        config: ``model``, ``task``, ``peft``, ``epsilon``, ``delta`` and what is not to be suggested; batch size, epochs,
            learning rate, bound, rank and scale are.
        examples: in the training data.
        length: of an example, in tokens; the mean, if they differ.
        minutes: that the steps may take; without it, `MOST_EPOCHS` passes may.
        gpu: simulate this one (``h100``, ``h200``) instead of measuring here.

    Raises:
        ConfigError: for settings that do not hold, a model that cannot be loaded, or a time too short for `LEAST_STEPS`.
    """
    _check(config, examples, length, minutes)
    tokenizer = load_tokenizer(config)
    model = load_trained(config, tokenizer)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    machine = _simulated(config, model, length, gpu) if gpu else measure(model, tokenizer, config, length)
    batches = _batches(examples)
    options = tuple(_option(config, examples, batch, trained, machine, minutes) for batch in batches)
    best = _suggested(options, minutes)
    rank, ranked = _rank(config, best)
    settings: dict[str, Any] = {
        "batch_size": best.batch_size,
        "epochs": best.epochs,
        "learning_rate": _learning_rate(config, best.steps),
        "schedule": "linear",
        "max_grad_norm": 1.0,
        **({"lora_r": rank, "lora_alpha": _SCALE * rank} if config.peft in ("lora", "dora") else {}),
    }
    within = "" if minutes is None else f" within {minutes:g} minutes"
    reasons = (
        f"batch {best.batch_size}: the least noise over signal of the sizes that leave {LEAST_STEPS} steps or more{within} (at a "
        "given budget it is noise over batch size that decides: scaling laws of private training, arXiv 2501.18914)",
        f"learning rate {settings['learning_rate']:.2g}: {_MOVEMENT:g} over the number of steps, as in the runs on E2E and SST-2 "
        "of docs/results.md",
        "bound 1: an adaptive optimizer undoes its scale, and the gradients of adapters are mostly above it",
        *ranked,
    )
    return Plan(options, best, machine, trained, dataclasses.replace(config, **settings), reasons)


def _check(config: FinetuneConfig, examples: int, length: int, minutes: float | None) -> None:
    if config.epsilon is None or not 0 < config.epsilon < math.inf:
        raise ConfigError(f"epsilon is {config.epsilon}: a plan needs a budget greater than 0")
    if not 0 < config.delta < 1 / examples:
        raise ConfigError(f"delta is {config.delta:g}: it must lie between 0 and 1 / {examples} examples")
    if examples < 2 * LEAST_STEPS:
        raise ConfigError(f"{examples} examples are too few to plan for: give at least {2 * LEAST_STEPS}")
    if length < 1:
        raise ConfigError(f"length is {length}: examples have at least 1 token")
    if minutes is not None and not minutes > 0:
        raise ConfigError(f"minutes is {minutes}: it must be greater than 0")


def _batches(examples: int) -> list[int]:
    sizes = (2**k for k in itertools.count(4))
    return list(itertools.takewhile(lambda size: size <= examples // 3, sizes)) or [examples // 3]


def _option(
    config: FinetuneConfig, examples: int, batch: int, trained: int, machine: Machine, minutes: float | None
) -> Option:
    per_epoch = math.ceil(examples / batch)
    epochs = MOST_EPOCHS
    if minutes is not None:
        epochs = min(epochs, 60 * minutes / machine.seconds(batch, per_epoch))
    # A tenth of a pass, and never none: what does not fit in the time is seen in the table.
    epochs = max(math.floor(10 * epochs) / 10, 0.1)
    steps = max(1, math.ceil(epochs * per_epoch))
    assert config.epsilon is not None
    noise = accounting.calibrate(
        lambda z: accounting.dpsgd(z, batch / examples, steps), config.epsilon, config.delta, tolerance=3e-3
    )
    ratio = noise * math.sqrt(trained) / batch
    return Option(batch, epochs, steps, noise, ratio, ratio / math.sqrt(steps), machine.seconds(batch, steps))


def _suggested(options: Sequence[Option], minutes: float | None) -> Option:
    fitting = [
        option
        for option in options
        if option.steps >= LEAST_STEPS and (minutes is None or option.seconds <= 60 * minutes * 1.01)
    ]
    if not fitting:
        least = min(option.seconds * LEAST_STEPS / option.steps for option in options)
        raise ConfigError(
            f"{minutes:g} minutes are too short: {LEAST_STEPS} steps of the smallest batch take {least / 60:.3g}; give more time"
        )
    return min(fitting, key=lambda option: option.run_ratio)


def _learning_rate(config: FinetuneConfig, steps: int) -> float:
    low, high = _RATES.get(config.peft, _RATES["lora"])
    rate = _MOVEMENT / steps * (1 if config.peft != "full" else 0.05)
    return float(f"{min(max(rate, low), high):.2g}")


def _rank(config: FinetuneConfig, best: Option) -> tuple[int, tuple[str, ...]]:
    if config.peft not in ("lora", "dora"):
        return config.lora_r, ()
    # The number of parameters goes with the rank, and the noise with its root.
    at_eight = best.run_ratio * math.sqrt(8 / config.lora_r)
    rank = next(rank for limit, rank in _RANKS if at_eight < limit)
    return rank, (
        f"rank {rank}: at rank 8 the run's noise is {at_eight:.2g} times its signal; it grows with the root of the rank",
        f"alpha {_SCALE * rank:g}, {_SCALE:g} times the rank: E2E came to perplexity 38 with that, and to 59 with twice the rank "
        "(docs/results.md)",
    )


def measure(model: torch.nn.Module, tokenizer: Any, config: FinetuneConfig, length: int) -> Machine:
    """Time and memory of private steps on invented tokens, on the model's device; the model is put back as it was.

    Two logical steps of three microbatches; the first looks at the model and is not counted.
    """
    physical, kept = config.physical_batch_size, {name: p.detach().clone() for name, p in _trained(model)}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, len(tokenizer), (3 * physical, length), generator=generator).tolist()
    rows: Any = [{"input_ids": row, "labels": invented_label(config, row, number)} for number, row in enumerate(ids)]
    pad: Any = tokenizer.pad_token_id
    device = next(model.parameters()).device
    loader: Any = DataLoader(rows, batch_size=len(rows), collate_fn=Collator(pad))
    optimizer = torch.optim.AdamW([p for _, p in _trained(model)], lr=0.0)
    peak = PeakMemory(device)
    private = fastdp.make_private(
        model, optimizer, loader, noise_multiplier=1.0, target_delta=1e-9, epochs=3, max_physical_batch_size=physical,
        sampling="shuffled",
    )  # fmt: skip
    was_training = model.training
    model.train()
    microbatches, releases = [], []
    try:
        for _ in range(3):
            begin = _now(device)
            for batch in private.data_loader:
                with autocast(device, config.precision):
                    loss = model(**{key: value.to(device) for key, value in batch.items()}).loss
                loss.backward()
                between = _now(device)
                optimizer.step()
                optimizer.zero_grad()
                microbatches.append(between - begin)
                begin = _now(device)
                if private.last_step_done:
                    releases.append(begin - between)
    finally:
        private.detach()
        model.train(was_training)
        with torch.no_grad():
            for name, parameter in _trained(model):
                parameter.copy_(kept[name])
    usual = sorted(microbatches[len(microbatches) // 3 :])
    example = usual[len(usual) // 2] / physical
    return Machine(example, min(releases[1:]), peak.so_far(), physical, f"measured here, on {device}")


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _simulated(config: FinetuneConfig, model: torch.nn.Module, length: int, gpu: str) -> Machine:
    from fastdp.bench import meter, simulate, workloads

    if gpu not in meter.GPUS:
        raise ConfigError(f"there is no price list for '{gpu}': choose one of {', '.join(meter.GPUS)}")
    shape: Any = model.config
    if shape.model_type not in ("gpt2", "bert", "llama") or config.peft not in ("full", "lora"):
        raise ConfigError(
            f"{shape.model_type} with {config.peft} cannot be simulated: gpt2, bert and llama can, full or with lora"
        )
    case = workloads.Case(
        kind=shape.model_type,
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        feed_forward=getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size,
        heads=shape.num_attention_heads,
        key_heads=getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads,
        vocabulary=shape.vocab_size,
        rows=config.physical_batch_size,
        tokens=length,
        rank=config.lora_r if config.peft == "lora" and shape.model_type == "llama" else 0,
        checkpointed=config.gradient_checkpointing,
        dtype=torch.bfloat16,
    )
    found = simulate.tally(case, meter.GPUS[gpu], private=True)
    return Machine(
        found.seconds / case.rows,
        0.0,
        found.peak_bytes,
        case.rows,
        f"SIMULATED for {meter.GPUS[gpu].name}, never measured",
    )


def invented(config: FinetuneConfig) -> FinetuneConfig:
    """The settings with labels where the task needs some, which a plan does not look at."""
    return dataclasses.replace(config, labels=config.labels or ["no", "yes"]) if config.task in LABELLED else config


def draw(found: Plan, path: str | Path) -> None:
    """Write a picture (PNG) of what each batch size trades: noise, noise over signal, steps, time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 5.6), layout="constrained")
    sizes = [option.batch_size for option in found.options]
    panels = (
        ("noise multiplier", [option.noise_multiplier for option in found.options]),
        ("noise over signal, whole run (at least)", [option.run_ratio for option in found.options]),
        ("steps", [option.steps for option in found.options]),
        ("minutes of steps", [option.seconds / 60 for option in found.options]),
    )
    for axes, (title, values) in zip(figure.subplots(2, 2).flat, panels):
        axes.plot(sizes, values, color="#1b3a57", marker="o", markersize=4)
        axes.axvline(found.best.batch_size, color="#c4572b", linestyle="--", linewidth=1.2)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45, fontsize=8)
        axes.set_title(title, fontsize=10, loc="left")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if title == "steps":
            axes.axhline(LEAST_STEPS, color="#8a8f98", linestyle=":", linewidth=1.2)
    figure.supxlabel(f"batch size ({found.machine.where}; dashed: suggested)", fontsize=9)
    figure.savefig(path, dpi=150)
