"""What the upper bound of norms costs on ordinary records: its excess over the computed norm, by model, tuning and dtype.

    python -m fastdp.bench.clipping --data DATA --model MODEL --json bench/results/clipping.json

``DATA`` holds ``e2e/train.csv`` (column ref) and ``sst2/train.tsv`` (column sentence); ``MODEL`` is a causal language
model with its tokenizer. A record is one text, its loss the mean over its tokens.
"""

from __future__ import annotations

import warnings
from collections import Counter, deque
from pathlib import Path
from typing import Any

import peft
import torch
import transformers as hf

from fastdp.data import read_rows
from fastdp.engine.bounds import UpperNorms
from fastdp.engine.engine import Engine
from fastdp.engine.layout import Ticket
from fastdp.engine.policy import Policy

from . import record

BATCH, BATCHES = 16, 8


class _Watch(Policy):
    """Flat clipping that notes by how much the bound exceeds the norm."""

    excess: list[torch.Tensor] = []

    def scales(self, upper: UpperNorms) -> torch.Tensor:
        self.excess.append((upper.norms / upper.measured.sqrt() - 1)[0])
        return super().scales(upper)


def texts(data: Path, name: str) -> list[str]:
    """Texts of a data set, in the order of its file."""
    path, column = {"e2e": ("e2e/train.csv", "ref"), "sst2": ("sst2/train.tsv", "sentence")}[name]
    return read_rows(data / path).column(column, "text")[: BATCH * BATCHES]


def model_of(path: str, tuning: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model in training mode, whole or with LoRA on its attention."""
    torch.manual_seed(0)
    model: torch.nn.Module = hf.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    if tuning == "lora":
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        )
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # as after some steps: with B = 0 half of the gradient is 0
                torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def measure(path: str, corpus: list[str], tuning: str, dtype: torch.dtype, *, two_pass: bool) -> dict[str, Any]:
    """Excess of the bound over the norm: median, 99% quantile and largest of all records."""
    tokenizer = hf.AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = model_of(path, tuning, dtype)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    tickets: deque[Ticket] = deque()
    _Watch.excess = []
    engine = Engine(model, _Watch((1.0,), (0.0,), dict.fromkeys(names, 0)), tickets, two_pass=two_pass)
    for start in range(0, len(corpus), BATCH):
        batch = tokenizer(
            corpus[start : start + BATCH], return_tensors="pt", padding=True, truncation=True, max_length=128
        )
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        tickets.append(Ticket(torch.arange(BATCH), torch.ones(BATCH), True))
        model(**batch, labels=labels).loss.backward()
        engine.accumulator.reset()
        engine.complete = False
    excess = torch.cat(_Watch.excess).double()
    assert bool(torch.isfinite(excess).all())
    return {
        "records": excess.numel(),
        "median": float(excess.median()),
        "p99": float(excess.quantile(0.99)),
        "largest": float(excess.max()),
        "routes": dict(Counter(route.name for route in engine.accumulator.routes.values())),
    }


def main() -> None:
    """Measure every case and save the figures."""
    parser = record.parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = {}
    for name in ("e2e", "sst2"):
        corpus = texts(options.data, name)
        for tuning in ("full", "lora"):
            for dtype in (torch.float32, torch.bfloat16):
                for two_pass in (False, True):
                    label = f"{name} {tuning} {str(dtype).removeprefix('torch.')}{' two passes' if two_pass else ''}"
                    cases[label] = measure(options.model, corpus, tuning, dtype, two_pass=two_pass)
                    print(label, cases[label], flush=True)
    record.write(options.json, cases)


if __name__ == "__main__":
    main()
