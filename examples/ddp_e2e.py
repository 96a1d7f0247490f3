"""One private fine-tuning by several processes: what they release is what one process would.

    python examples/ddp_e2e.py
    torchrun --nproc-per-node 2 examples/ddp_e2e.py

By default the model and the records are those of `fastdp quickstart`, which are part of the package. `--train` and `--eval`
take files with a text a line (E2E's, say), and `--model` a causal model of your own. There is no `DistributedSampler` and no
`DistributedDataParallel`: every process has the model, the loader and the batch size of the whole, and takes its share.
"""

import argparse
import math
import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastdp
from fastdp.quickstart.corpus import private_records

PUBLIC_MODEL = resources.files("fastdp.quickstart") / "model"
HELD_OUT = 128


def texts(chosen: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Texts to train on, and held-out ones."""
    if chosen.train is None:
        records = private_records(chosen.records + HELD_OUT, seed=0)
        return records[HELD_OUT:], records[:HELD_OUT]
    train, held_out = (Path(path).read_text(encoding="utf-8").splitlines() for path in (chosen.train, chosen.eval))
    return train, held_out


def perplexity(model: torch.nn.Module, batches: Any) -> float:
    """Of held-out texts, by token; computed without privacy, which is nobody's record here."""
    total, tokens = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in batches:
            count = int((batch["labels"][:, 1:] != -100).sum())
            total, tokens = total + count * float(model(**batch).loss), tokens + count
    return math.exp(total / tokens)


def options(description: str) -> argparse.ArgumentParser:
    """What both examples can be told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=str(PUBLIC_MODEL))
    parser.add_argument("--train", help="a text a line; by default, invented records")
    parser.add_argument("--eval", help="the same, held out; with --train")
    parser.add_argument("--records", type=int, default=2048, help="how many are invented")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--output", help="folder for ledger and card; it must not hold another run")
    parser.add_argument("--unsafe-seed", type=int, help="makes sampling and noise repeatable, which protects nothing")
    return parser


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, chosen: argparse.Namespace) -> None:
    """Train privately, and print perplexity and epsilon."""
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def collate(items: list[str]) -> dict[str, torch.Tensor]:
        batch = tokenizer(items, return_tensors="pt", padding=True, truncation=True, max_length=80)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    records, held_out = texts(chosen)
    evaluated = DataLoader(held_out, batch_size=64, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, data_loader = private = fastdp.make_private(
        model,
        optimizer,
        DataLoader(records, batch_size=256, collate_fn=collate),  # type: ignore[arg-type]
        target_epsilon=chosen.epsilon,
        target_delta=1e-5,
        epochs=chosen.epochs,
        max_physical_batch_size=32,
        output_dir=chosen.output,
        unsafe_seed=chosen.unsafe_seed,
    )
    # Whatever reads the model, every process does: of one in pieces each has but its own.
    before = perplexity(model, evaluated)
    while private.steps_done < private.total_steps:
        for batch in data_loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    after, card = perplexity(model, evaluated), private.card()
    if not dist.is_initialized() or dist.get_rank() == 0:
        if chosen.output is not None:
            card.save(Path(chosen.output) / "card.json")
        print(f"perplexity before: {before:.2f}")
        print(f"perplexity after {private.steps_done} releases: {after:.2f}")
        print(f"epsilon {private.epsilon():.3g} at delta 1e-5, by {card['model']['processes']} processes")
    private.detach()


def main() -> None:
    """Train all weights, by as many processes as there are."""
    chosen = options(__doc__.splitlines()[0]).parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    train(model, fastdp.optim.AdamW(model.parameters(), lr=1e-3), chosen)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
