"""A finished run of `fastdp split customer`, trained again in one process with plain PyTorch and peft, and compared.

    python -m bench.split_alone CUSTOMER --model MODEL --train train.tsv --eval dev.tsv --eta 16 --json OUT.json

CUSTOMER is the customer's folder: the same released rows, in the same batches, train the same kind of adapter on the same
model. The adapter's first weights and the noise on the held-out texts are drawn anew. One pass over the texts is repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import torch

from fastdp.data import read_rows
from fastdp.methods.sap import TextPrivatizer
from fastdp.split.customer import batch_of
from fastdp.split.store import ExampleStore

from .record import write
from .split import InProcess


def main(arguments: list[str] | None = None) -> None:
    """Train, compare, print, and write to --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("customer", type=Path, help="folder of the customer")
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--eval", type=Path, required=True)
    parser.add_argument("--eta", type=float, required=True)
    parser.add_argument("--network-accuracy", type=float, help="what the customer printed, to stand beside")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    losses = [json.loads(line)["loss"] for line in (given.customer / "losses.jsonl").read_text().splitlines()]
    record = json.loads((given.customer / "customer.json").read_text())
    found = train(given.customer, given.model, given.train, given.eval, given.eta, record["batch_size"])
    last = max(1, len(losses) // 10)
    figures = {
        "model": Path(given.model).name,
        "eta": given.eta,
        "steps": len(found["losses"]),
        "network": {"last_tenth_loss": statistics.mean(losses[-last:]), "accuracy": given.network_accuracy},
        "in_process": {"last_tenth_loss": statistics.mean(found["losses"][-last:]), "accuracy": found["accuracy"]},
        "held_out": found["held_out"],
    }
    print(json.dumps(figures, indent=1))
    if given.json is not None:
        write(given.json, figures)


def train(customer: Path, name: str, train_path: Path, eval_path: Path, eta: float, batch_size: int) -> dict[str, Any]:
    """Losses of one pass over the released rows, and accuracy on held-out texts that are privatized alike."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    labels = torch.tensor([int(label) for label in read_rows(train_path).column("label", "--label-column")])
    store = ExampleStore(customer / "released", model.config.hidden_size, torch.float32)
    alone = InProcess(model, store, labels)
    steps = range(math.ceil(store.count / batch_size))
    losses = [alone.step(batch_of(number, store.count, batch_size, 0)) for number in steps]
    bottom, adapted = alone.bottom, alone.top
    table = read_rows(eval_path)
    texts, truth = table.column("sentence", "--text-column"), table.column("label", "--label-column")
    privatizer = TextPrivatizer(bottom.model, eta=eta, tokenizer=tokenizer, mechanism="exponential", duplicates="merge")
    adapted.eval()
    right = 0
    with torch.no_grad():
        for begin in range(0, len(texts), 64):
            batch = tokenizer(
                texts[begin : begin + 64], truncation=True, max_length=64, padding=True, return_tensors="pt"
            )
            sent = privatizer(batch["input_ids"], attention_mask=batch["attention_mask"])
            logits = adapted(
                inputs_embeds=bottom(sent, batch["attention_mask"]), attention_mask=batch["attention_mask"]
            ).logits
            right += int((logits.argmax(1) == torch.tensor([int(v) for v in truth[begin : begin + 64]])).sum())
    return {"losses": losses, "accuracy": right / len(texts), "held_out": len(texts)}


if __name__ == "__main__":
    main()
