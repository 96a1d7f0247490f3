"""What private steps take on this machine, tried on invented tokens."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch.utils.data import DataLoader

import fastdp
from fastdp.data import Collator, Examples
from fastdp.finetune.config import FinetuneConfig
from fastdp.finetune.evaluation import autocast
from fastdp.finetune.memory import PeakMemory, rehearse_step
from fastdp.finetune.tasks import invented_label

#: Examples that are drawn, in as many logical batches as they fill, to find how much padding a batch size needs.
_SAMPLED_EXAMPLES, _FEWEST = 100_000, 50
#: Rounds over the same micro-batches after the first one, in which the model is looked at: so many at least, and more of
#: short ones, until they have taken so many seconds. How fast a machine is that others share changes within seconds.
_ROUNDS, _MOST_ROUNDS, _SECONDS = 4, 16, 8.0


@dataclass(frozen=True)
class Machine:
    """What private steps take.

    Attributes:
        microbatch_seconds: of forward and backward, whatever is in them.
        token_seconds: besides, for each token and each place that is filled up to the longest example.
        release_seconds: of noise and update, once a step.
        look_seconds: of following the model through a micro-batch of a length that no earlier one had.
        start_seconds: of the looks at a run's first batch, once.
        peak_bytes: with ``physical`` examples in memory at once.
        lengths: of examples in tokens: the shortest, those at equal shares of the examples, and the longest.
        where: in words.
        backward_passes: of a micro-batch, at most.
        rows: that a unit of a logical batch has on average: more than 1 where people are protected.
    """

    microbatch_seconds: float
    token_seconds: float
    release_seconds: float
    look_seconds: float
    start_seconds: float
    peak_bytes: int
    physical: int
    lengths: tuple[int, ...]
    where: str
    backward_passes: int = 1
    rows: float = 1.0

    def step_seconds(self, batch_size: int) -> float:
        """Of a usual step: as many micro-batches, as padded, as logical batches have on average."""
        drawn = _drawn_batches(self.lengths, round(batch_size * self.rows), self.physical)
        each = [self.microbatch_seconds + self.token_seconds * rows * longest for b in drawn for rows, longest in b]
        return self.release_seconds + sum(each) / len(drawn)

    def once_seconds(self, batch_size: int, steps: int) -> float:
        """What so many steps take besides: the looks at the first batch, and one at each new length that comes up."""
        drawn = _drawn_batches(self.lengths, round(batch_size * self.rows), self.physical)
        having = Counter(longest for batch in drawn for longest in {longest for _, longest in batch})
        met = sum(1 - (1 - count / len(drawn)) ** steps for count in having.values())
        return self.start_seconds + self.look_seconds * max(0.0, met - 1)

    def seconds(self, batch_size: int, steps: int) -> float:
        """Of a run's steps, all told."""
        return self.once_seconds(batch_size, steps) + steps * self.step_seconds(batch_size)


@lru_cache(maxsize=64)
def _drawn_batches(lengths: tuple[int, ...], batch_size: int, physical: int) -> list[list[tuple[int, int]]]:
    """Rows and longest length of each micro-batch of some logical batches, as a private loader would cut them."""
    generator = np.random.default_rng(0)
    found = []
    for size in generator.poisson(batch_size, max(_FEWEST, _SAMPLED_EXAMPLES // batch_size)):
        # An empty batch is one padding row.
        drawn = np.sort(_spread(lengths, generator.random(max(1, size))))[::-1]
        found.append([(len(part), int(part[0])) for part in np.split(drawn, range(physical, len(drawn), physical))])
    return found


def _spread(lengths: Sequence[int], shares: Any) -> Any:
    """The lengths below which such shares of the examples lie."""
    return np.rint(np.quantile(lengths, shares)).astype(int)


def measure(model: torch.nn.Module, tokenizer: Any, config: FinetuneConfig, lengths: Sequence[int]) -> Machine:
    """Time and memory of private steps on invented tokens, on the model's device; the model is put back as it was.

    Three full micro-batches and a small one make a logical batch, whose lengths spread as those of examples do; it goes through
    the same loop at least five times, and a ledger is kept. The first time the model is looked at, which a run has to pay for
    once.

    Args:
        lengths: of examples, as `Machine` has them.

    Raises:
        ConfigError: if the longest examples do not fit into the device's memory.
    """
    device, kept = next(model.parameters()).device, {name: p.detach().clone() for name, p in _trained(model)}
    was_training = model.training
    examples, pad = _invented(tokenizer, config, lengths), Collator(tokenizer.pad_token_id)
    rehearse_step(model, examples, pad, config)
    loader: Any = DataLoader(examples, batch_size=len(examples), collate_fn=pad)
    optimizer = torch.optim.AdamW([p for _, p in _trained(model)], lr=0.0)
    peak = PeakMemory(device)
    with tempfile.TemporaryDirectory() as folder:
        private = fastdp.make_private(
            model, optimizer, loader, noise_multiplier=1.0, target_delta=1e-9, epochs=1 + _MOST_ROUNDS, sampling="shuffled",
            max_physical_batch_size=config.physical_batch_size, output_dir=folder,
        )  # fmt: skip
        private.ending.expect()
        model.train()
        try:
            rounds, releases, shapes = _time_rounds(private, model, optimizer, config)
        finally:
            private.detach()
            model.train(was_training)
            with torch.no_grad():
                for name, parameter in _trained(model):
                    parameter.copy_(kept[name])
    usual = np.median(np.array(rounds[1:]), axis=0)
    first = shapes[: len(usual)]
    # Neither is below zero.
    (each, a_token), _ = nnls(np.array([(1, rows * longest) for rows, longest in first]), usual)
    extra = np.array(rounds[0]) - usual
    # Micro-batches of a length that none before them had. Other checks fall on some of them too, so the quickest tells.
    new = [k for k in range(1, len(first)) if first[k][1] not in {longest for _, longest in first[:k]}]
    look = max(0.0, float(extra[new].min())) if new else 0.0
    return Machine(
        microbatch_seconds=float(each),
        token_seconds=float(a_token),
        release_seconds=float(np.median(releases[1:])),
        look_seconds=look,
        start_seconds=max(0.0, float(extra.sum()) - len(new) * look),
        peak_bytes=peak.so_far(),
        physical=config.physical_batch_size,
        lengths=tuple(lengths),
        where=f"measured here, on {device}",
        backward_passes=private.backward_passes,
    )


def _time_rounds(
    private: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer, config: FinetuneConfig
) -> tuple[list[list[float]], list[float], list[tuple[int, int]]]:
    """Seconds of each micro-batch by round, seconds of each release, and shapes of the micro-batches."""
    device = next(model.parameters()).device
    rounds: list[list[float]] = []
    releases: list[float] = []
    shapes: list[tuple[int, int]] = []
    for number in range(1 + _MOST_ROUNDS):
        if number > _ROUNDS and sum(map(sum, rounds[1:])) > _SECONDS:
            break
        rounds.append([])
        begin = _now(device)
        for batch in private.data_loader:
            batch = {key: value.to(device) for key, value in batch.items()}
            with autocast(device, config.precision):
                loss = model(**batch).loss
            loss.backward()
            between = _now(device)
            optimizer.step()
            optimizer.zero_grad()
            rounds[-1].append(between - begin)
            shapes.append(tuple(batch["input_ids"].shape))
            begin = _now(device)
            if private.last_step_done:
                releases.append(begin - between)
    return rounds, releases, shapes


def _invented(tokenizer: Any, config: FinetuneConfig, lengths: Sequence[int]) -> Examples:
    """Three full micro-batches and a small one, of such lengths."""
    count = 3 * config.physical_batch_size + max(1, config.physical_batch_size // 4)
    generator = np.random.default_rng(0)
    spread = _spread(lengths, np.linspace(0, 1, count))
    ids = [generator.integers(0, len(tokenizer), length).tolist() for length in spread]
    return Examples(
        [{"input_ids": row, "labels": invented_label(config, row, number)} for number, row in enumerate(ids)], 0
    )


def _trained(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
