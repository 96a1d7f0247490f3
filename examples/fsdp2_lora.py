"""LoRA on a model whose weights lie in pieces on several processes, by torch's `fully_shard`: the release of one process.

    python examples/fsdp2_lora.py
    accelerate launch --cpu --num_processes 2 examples/fsdp2_lora.py

By default the model and the records are those of `fastdp quickstart`, as in `ddp_e2e.py`; `--model` takes a causal model of your
own. Give `fully_shard` the blocks and then the model, build the optimizer, then call `make_private`: nothing else is to be done.
"""

import argparse
import os
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from ddp_e2e import PUBLIC_MODEL, perplexity, texts
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import fastdp


def cut(model: torch.nn.Module, base: PreTrainedModel) -> None:
    """Leave this process a piece of every block, and of what is around them."""
    for module in list(model.modules()):
        if type(module).__name__ in (base._no_split_modules or ()):
            fully_shard(module)
    fully_shard(model)


def main() -> None:
    """Train privately, and print perplexity and epsilon."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(PUBLIC_MODEL))
    parser.add_argument("--train", help="a text a line; by default, invented records")
    parser.add_argument("--eval", help="the same, held out; with --train")
    parser.add_argument("--records", type=int, default=2048, help="how many are invented")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--rank", type=int, default=8, help="of LoRA")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations anew in the backward pass")
    parser.add_argument("--output", help="folder for ledger and card; it must not hold another run")
    parser.add_argument("--unsafe-seed", type=int, help="makes sampling and noise repeatable, which protects nothing")
    chosen = parser.parse_args()

    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        dist.init_process_group("gloo")
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    base = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    base.config.use_cache = False
    if chosen.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
    # Every process must begin with the same adapters.
    torch.manual_seed(0)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=chosen.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    if several:
        cut(model, base)
    held = sum((p.to_local() if several else p).numel() for p in model.parameters())

    def collate(items: list[str]) -> dict[str, torch.Tensor]:
        batch = tokenizer(items, return_tensors="pt", padding=True, truncation=True, max_length=80)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    train, held_out = texts(chosen)
    evaluated = DataLoader(held_out, batch_size=64, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, data_loader = private = fastdp.make_private(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3),
        DataLoader(train, batch_size=256, collate_fn=collate),  # type: ignore[arg-type]
        target_epsilon=chosen.epsilon,
        target_delta=1e-5,
        epochs=chosen.epochs,
        max_physical_batch_size=32,
        output_dir=chosen.output,
        unsafe_seed=chosen.unsafe_seed,
    )
    first = not several or dist.get_rank() == 0
    # Whatever reads the model, every process does: each has but a piece of it.
    before = perplexity(model, evaluated)
    while private.steps_done < private.total_steps:
        for batch in data_loader:
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    after, card = perplexity(model, evaluated), private.card()
    if first:
        if chosen.output is not None:
            card.save(Path(chosen.output) / "card.json")
        print(f"perplexity before: {before:.2f}")
        print(f"perplexity after {private.steps_done} releases: {after:.2f}")
        print(f"epsilon {private.epsilon():.3g} at delta 1e-5, by {card['model']['processes']} processes")
        print(f"parameters on this process: {held:,} of {sum(p.numel() for p in model.parameters()):,}")
    private.detach()
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
