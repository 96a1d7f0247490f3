"""Peak memory and time of a step of a small decoder with a large vocabulary, with and without its logits.

``python -m fastdp.bench.head bench/results/cpu/head.json``. Each case has processes of its own, one thread each, whose C library
gives freed blocks back (`bench.memory`). Time is the process's own processor time, the least of several steps, so that what
else a machine does is not in it; peaks are resident memory above what the process held before the step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from .memory import ENVIRONMENT, growth
from .record import write

IMPLEMENTATIONS = ("non-private", "with logits", "without logits")
#: Steps that are taken, the first of which is traced, and checked where the case says so.
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One model and one batch: ``tuning`` is "full" (tied or not) or "frozen head"; ``checked`` with the self-check."""

    name: str
    vocabulary: int
    width: int
    tokens: int
    rows: int
    tuning: str = "full"
    tied: bool = True
    layers: int = 1
    checked: bool = False


CASES = (
    Case("rows longer than twice the width", 131_072, 64, 1024, 2),
    Case("rows shorter than that", 131_072, 160, 256, 8),
    Case("frozen head", 131_072, 64, 1024, 2, tuning="frozen head"),
    Case("untied, many rows", 32_000, 512, 512, 8, tied=False),
    Case("checked first step", 131_072, 64, 1024, 2, checked=True),
)


def measure(case: Case, implementation: str) -> dict[str, Any]:
    """Peaks of the first step and of later ones in bytes, and processor seconds of a later step."""
    import torch
    from torch.utils.data import DataLoader
    from transformers import LlamaConfig, LlamaForCausalLM

    import fastdp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=case.vocabulary,
        hidden_size=case.width,
        intermediate_size=2 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=case.tokens,
        tie_word_embeddings=case.tied,
    )
    model = LlamaForCausalLM(config)
    if case.tuning == "frozen head":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "layers" in name
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    ids = torch.randint(0, case.vocabulary, (case.rows * (STEPS + 1), case.tokens))
    batches: Any = [{"input_ids": t, "labels": t} for t in ids.split(case.rows)]
    if implementation != "non-private":
        examples: Any = [{"input_ids": t, "labels": t} for t in ids]
        loader: Any = DataLoader(examples, batch_size=case.rows)
        private = fastdp.make_private(
            model,
            optimizer,
            loader,
            noise_multiplier=1.0,
            epochs=1,
            sampling="shuffled",
            self_check=case.checked,
            keep_logits=implementation == "with logits",
        )
        batches = private.data_loader
    model.train()
    steps = iter(batches)
    peaks, seconds = [], []

    def step() -> None:
        batch = next(steps)
        model(**batch, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        begun = time.process_time()
        peak = growth(step)
        seconds.append(time.process_time() - begun)
        peaks.append(peak)
    later = [p for p in peaks[1:] if p is not None]
    return {"first_peak_bytes": peaks[0], "peak_bytes": max(later, default=None), "cpu_seconds": min(seconds[1:])}


def _apart(case: Case, implementation: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "fastdp.bench.head", case.name, implementation],
        env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{case.name}, {implementation}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str]) -> None:
    """One case of one implementation, printed; or all of them into a file."""
    if len(arguments) == 2:
        case = next(case for case in CASES if case.name == arguments[0])
        print(json.dumps(measure(case, arguments[1])), flush=True)
        return
    figures = []
    for case in CASES:
        logits = 4 * case.rows * case.tokens * case.vocabulary
        found = {name: _apart(case, name) for name in IMPLEMENTATIONS}
        for own in found.values():
            for peak in ("first_peak_bytes", "peak_bytes"):
                own[peak.replace("bytes", "over_logits")] = None if own[peak] is None else round(own[peak] / logits, 3)
        figures.append({"case": asdict(case), "logits_bytes": logits, "implementations": found})
        print(json.dumps(figures[-1]), flush=True)
    write(
        arguments[0],
        {
            "how": "one thread; processor time of the process, the least of two steps after the first; resident memory",
            "cases": figures,
        },
    )


if __name__ == "__main__":
    main(sys.argv[1:])
