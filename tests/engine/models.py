"""Stock Hugging Face models at small random configurations, and a batch for each."""

from __future__ import annotations

from typing import Any

import peft
import torch
from fastdp.bench.models import small, turn_dropout_off

import fastdp

#: Of `bench.models`, which tries more.
MODELS = (
    *("gpt2", "llama", "mistral", "qwen3", "gemma3", "phi", "opt", "gpt-neox", "bert", "bert-mlm", "roberta"),
    *("distilbert", "electra", "albert", "t5", "bart", "vit"),
)
_CLASSIFIERS = frozenset({"bert", "roberta", "distilbert", "electra", "albert", "vit"})
_TARGETS = {
    "gpt2": ["c_attn", "c_proj"],
    "gpt-neox": ["query_key_value", "dense"],
    "distilbert": ["q_lin", "v_lin"],
    "t5": ["q", "v"],
    "bert": ["query", "value"],
    "bert-mlm": ["query", "value"],
    "roberta": ["query", "value"],
    "electra": ["query", "value"],
    "albert": ["query", "value"],
    "vit": ["q_proj", "v_proj", "query", "value"],
}
_TASKS = {"t5": "SEQ_2_SEQ_LM", "bart": "SEQ_2_SEQ_LM"}


def task_type(name: str) -> str | None:
    """PEFT's name for what a model does."""
    if name in _CLASSIFIERS:
        return None if name == "vit" else "SEQ_CLS"
    return _TASKS.get(name, None if name == "bert-mlm" else "CAUSAL_LM")


def lora_targets(name: str) -> list[str]:
    return _TARGETS.get(name, ["q_proj", "v_proj"])


def build(name: str, tuning: str = "full", seed: int = 0) -> torch.nn.Module:
    """A model in training mode without dropout; ``tuning`` is full or the name of a parameter-efficient method."""
    torch.manual_seed(seed)
    model = small(name)
    turn_dropout_off(model)
    model = _tune(model, name, tuning)
    with torch.no_grad():
        for parameter in model.parameters():
            # Zero initial values (biases, LoRA's B) would hide errors: every parameter gets some.
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def _tune(model: torch.nn.Module, name: str, tuning: str) -> torch.nn.Module:
    task = task_type(name)
    if tuning == "full":
        return model
    if tuning == "bitfit":
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name.split(".")[-1] in ("bias", "beta"))
        return model
    if tuning == "ia3":
        wide = {"gpt2": (["c_attn", "mlp.c_proj"], ["mlp.c_proj"]), "llama": (["k_proj", "down_proj"], ["down_proj"])}
        targets, feedforward = wide[name]
        config: Any = peft.IA3Config(task_type=task, target_modules=targets, feedforward_modules=feedforward)
    elif tuning in ("lora", "dora"):
        config = peft.LoraConfig(
            task_type=task, r=3, target_modules=lora_targets(name), lora_dropout=0.0, use_dora=tuning == "dora"
        )
    elif tuning == "prompt":
        config = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=4)
    elif tuning == "prefix":
        config = peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=4)
    elif tuning == "bottleneck":
        config = fastdp.BottleneckConfig(task_type=task, bottleneck_size=5)
    else:
        raise ValueError(f"unknown tuning {tuning}")
    tuned = peft.get_peft_model(model, config)
    if tuning == "dora":
        # Fresh adapters add nothing, and the norm that DoRA divides by would be that of the frozen weight alone.
        for parameter_name, parameter in tuned.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.1)
    return tuned


def batch(name: str, rows: int = 4, tokens: int = 11, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch whose rows differ in length, with repeated tokens and ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {
            "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 3, (rows,), generator=generator),
        }
    ids = torch.randint(3, 20, (rows, tokens), generator=generator)
    lengths = torch.arange(rows) % 3 + tokens - 2
    mask = (torch.arange(tokens) < lengths.unsqueeze(1)).long()
    ids = ids * mask
    if name in _CLASSIFIERS:
        labels = torch.randint(0, 3, (rows,), generator=generator)
    elif name in ("t5", "bart"):
        labels = torch.randint(3, 20, (rows, tokens - 3), generator=generator)
        labels[0, 4:] = -100
    else:
        labels = ids.masked_fill(mask == 0, -100)
        labels[-1, : tokens // 2] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class PackedLinear(torch.nn.Linear):
    """A stand-in for a frozen linear layer of four bits: two codes a byte, stored as float32 as `fully_shard` needs it.

    bitsandbytes keeps weights so with ``bnb_4bit_quant_storage``: of a shape of their own, whose numbers mean nothing.
    """

    scale: torch.Tensor

    def __init__(self, plain: torch.nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=False)
        weight = plain.weight.detach()
        self.register_buffer("scale", weight.abs().amax(1, keepdim=True) / 7)
        codes = (weight / self.scale).round().add_(8).to(torch.uint8).view(-1, 2)
        packed = (codes[:, 0] + 16 * codes[:, 1]).view(torch.float32)
        self.weight = torch.nn.Parameter(packed.view(-1, 1), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        packed = self.weight.detach().view(torch.uint8).view(-1)
        codes = torch.stack([packed % 16, packed // 16], 1).view(self.out_features, self.in_features)
        return torch.nn.functional.linear(input, (codes.to(input.dtype) - 8) * self.scale)


def pack(model: torch.nn.Module) -> torch.nn.Module:
    """Replace the layers under LoRA's adapters by those of four bits."""
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "base_layer")]
    for module in adapted:
        module.base_layer = PackedLinear(module.base_layer)
    return model
