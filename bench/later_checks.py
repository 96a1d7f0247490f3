"""What looking at later batches costs over a whole run: the share of each kind of look in its processor time.

    python -m fastdp.bench.later_checks --json bench/results/cpu/later-checks.json

A run of 200 steps on one core: GPT-2 (4 layers, 256 wide, 64 tokens) with LoRA, as a whole, and as a whole with
checkpointing, whose two backward passes are compared. The first batch is left out, as it is checked once whatever the run's
length; its cost stands beside, in steps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import torch
import transformers as hf
from torch.utils.data import DataLoader

import fastdp
from fastdp.engine.checks import Checks
from fastdp.engine.guard import Guard
from fastdp.engine.later import Structure
from fastdp.engine.likeness import Likeness, Noting

from . import record

ROWS, TOKENS, VOCABULARY = 8, 64, 5000
TUNINGS = ("lora", "full", "checkpointed")
#: What is timed, and what it is called.
LOOKS: dict[str, list[tuple[type, str]]] = {
    "checks of later batches": [(Checks, "_check_again")],
    "whether the model was switched": [(Structure, "changed")],
    "whether state moved outside a release": [
        (Guard, name) for name in ("settle", "require_settled", "require_untouched", "require_frozen", "_buffers")
    ],
    "whether both passes were alike": [(Noting, "_keep"), (Likeness, "compared")],
}


def model_of(tuning: str) -> torch.nn.Module:
    """The model in training mode."""
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=256, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2)
    model: torch.nn.Module = hf.GPT2LMHeadModel(config)
    if tuning == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))
    if tuning == "checkpointed":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    return model.train()


@contextmanager
def timed(spent: dict[str, float], counted: Counter[str]) -> Iterator[None]:
    """Adds the processor time of every look to ``spent``, of the outermost where one calls another."""
    inside = [False]

    def clocked(look: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return original(*args, **kwargs)
            inside[0], began = True, time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                inside[0] = False
                spent[look] += time.process_time() - began
                counted[look] += 1

        return call

    with ExitStack() as stack:
        for look, places in LOOKS.items():
            for owner, name in places:
                stack.enter_context(mock.patch.object(owner, name, clocked(look, getattr(owner, name))))
        yield


def measure(tuning: str, steps: int) -> dict[str, Any]:
    """The shares of one run."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (ROWS * steps, TOKENS), generator=generator)
    data = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
    model = model_of(tuning)
    private = fastdp.make_private(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4),
        DataLoader(data, batch_size=ROWS),  # type: ignore[arg-type]
        method=fastdp.DPSGD(max_grad_norm=1.0),
        noise_multiplier=1.0,
        epochs=1,
        sampling="shuffled",
    )
    spent: dict[str, float] = dict.fromkeys(LOOKS, 0.0)
    counted: Counter[str] = Counter()
    first, began = 0.0, time.process_time()
    with timed(spent, counted):
        for batch in private.data_loader:
            private.optimizer.zero_grad()
            private.model(**batch).loss.backward()
            private.optimizer.step()
            if not first:
                first = time.process_time() - began
                spent.update(dict.fromkeys(LOOKS, 0.0))
                counted.clear()
    whole = time.process_time() - began - first
    private.detach()
    each = (whole - spent["checks of later batches"]) / (steps - 1)
    return {
        "steps": steps,
        "seconds a step": round(each, 4),
        "first batch, in steps": round(first / each, 1),
        "checks made": counted["checks of later batches"],
        "share of the run": {look: round(spent[look] / whole, 5) for look in LOOKS},
    }


def main() -> None:
    """Measure each tuning, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=TUNINGS, help="measure this one, and keep what the file says of the others")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(options.json.read_text())["figures"] if options.only and options.json.exists() else {}
    for tuning in [options.only] if options.only else TUNINGS:
        found[tuning] = measure(tuning, options.steps)
        print(tuning, found[tuning], flush=True)
    if options.json:
        record.write(options.json, found)


if __name__ == "__main__":
    main()
