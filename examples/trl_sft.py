"""Supervised fine-tuning with trl on private texts, packed, by the example; the adapter loads in plain peft afterwards.

    python examples/trl_sft.py --model MODEL --output runs/sft

MODEL is a folder or a name on the hub; without one, the small model that ships with fastdp is used. The texts are generated:
records of people who do not exist.
"""

import argparse
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig

import fastdp
from fastdp.quickstart.corpus import private_records


def options(description: str, output: str) -> argparse.ArgumentParser:
    """What both examples can be told."""
    parser = argparse.ArgumentParser(description=description)
    shipped = resources.files("fastdp.quickstart") / "model"
    parser.add_argument("--model", default=str(shipped), help="folder or name of a causal language model")
    parser.add_argument("--output", default=output)
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="expected examples in a logical batch")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--epsilon", type=float, default=8.0)
    return parser


def arguments(chosen: argparse.Namespace) -> dict[str, Any]:
    """Settings of transformers' own that both trainers share."""
    return {
        "output_dir": chosen.output,
        "per_device_train_batch_size": chosen.batch,
        "num_train_epochs": chosen.epochs,
        "learning_rate": 1e-3,
        "max_length": 128,
        "bf16": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "report_to": "none",
    }


def run(trainer_class: Any, config: Any, dataset: Dataset, chosen: argparse.Namespace, rows: int) -> None:
    """Train an adapter, at most ``rows`` examples at once; then load what was saved without fastdp and compare."""
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    trainer = trainer_class(
        model=AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32),
        args=config,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
        privacy=fastdp.PrivacyArguments(
            target_epsilon=chosen.epsilon,
            target_delta=0.1 / chosen.examples,
            max_physical_batch_size=rows,
        ),
    )
    trainer.train()
    folder = Path(chosen.output) / "adapter"
    trainer.save_model(str(folder))

    plain = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, folder).eval()
    text = tokenizer("Patient:", return_tensors="pt").to(trainer.model.device)
    with torch.no_grad():
        same = torch.equal(loaded.to(text["input_ids"].device)(**text).logits, trainer.model.eval()(**text).logits)
    private = trainer.private
    print(f"epsilon {private.epsilon():.3g} after {private.steps_done} releases; card in {chosen.output}")
    print(f"the adapter in {folder}, loaded by peft alone, gives the same logits: {same}")


def main() -> None:
    """Train on packed records."""
    chosen = options(__doc__.splitlines()[0], "runs/trl-sft").parse_args()
    records = Dataset.from_dict({"text": private_records(chosen.examples, seed=0)})
    run(fastdp.DPSFTTrainer, SFTConfig(packing=True, **arguments(chosen)), records, chosen, rows=32)


if __name__ == "__main__":
    main()
