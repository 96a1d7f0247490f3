"""Direct preference optimization with trl on private pairs; the unit that is protected is a pair with its prompt.

    python examples/trl_dpo.py --model MODEL --output runs/dpo

MODEL is a folder or a name on the hub; without one, the small model that ships with fastdp is used. The texts are generated: of
each record the beginning is the prompt, and its own end is preferred to one that was generated apart.
"""

import argparse
from importlib import resources
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig

import fastdp
from fastdp.quickstart.corpus import private_records


def preferences(count: int) -> Dataset:
    """Pairs of a record's own end and that of a record which is nobody's: a pair holds one record."""
    columns: dict[str, list[str]] = {"prompt": [], "chosen": [], "rejected": []}
    for record, other in zip(private_records(count, seed=0), private_records(count, seed=1)):
        start, _, end = record.partition(";")
        columns["prompt"].append(start)
        columns["chosen"].append(";" + end)
        columns["rejected"].append(";" + other.partition(";")[2])
    return Dataset.from_dict(columns)


def main() -> None:
    """Train, then load what was saved without fastdp and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shipped = resources.files("fastdp.quickstart") / "model"
    parser.add_argument("--model", default=str(shipped), help="folder or name of a causal language model")
    parser.add_argument("--output", default="runs/trl-dpo")
    parser.add_argument("--pairs", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64, help="expected pairs in a logical batch")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--epsilon", type=float, default=8.0)
    chosen = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32)
    trainer = fastdp.DPDPOTrainer(
        model=model,
        args=DPOConfig(
            output_dir=chosen.output,
            per_device_train_batch_size=chosen.batch,
            num_train_epochs=chosen.epochs,
            learning_rate=1e-3,
            max_length=128,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=preferences(chosen.pairs),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, task_type="CAUSAL_LM"),
        privacy=fastdp.PrivacyArguments(
            target_epsilon=chosen.epsilon,
            target_delta=0.1 / chosen.pairs,
            max_physical_batch_size=16,
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
    assert trainer.private is not None
    print(
        f"epsilon {trainer.private.epsilon():.3g} after {trainer.private.steps_done} releases; card in {chosen.output}"
    )
    print(f"the adapter in {folder}, loaded by peft alone, gives the same logits: {same}")


if __name__ == "__main__":
    main()
