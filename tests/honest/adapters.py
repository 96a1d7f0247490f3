"""Parameter-efficient tuning: every method of peft that ordinary scripts use."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import nn

from .harness import Case, program, register
from .kit import (
    MEAN,
    bert,
    causal,
    classify,
    crossentropy,
    gpt2,
    id_rows,
    labelled,
    llama,
    mlp,
    numbers,
    pair_rows,
    t5,
    translate,
)

_ATTENTION = ["q_proj", "v_proj"]


def adapted(model: Any, config: Any) -> Any:
    """A model with adapters that no longer begin at zero."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def lora(**options: Any) -> Any:
    """LoRA of a causal model."""
    return peft.LoraConfig(
        **{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": _ATTENTION, **options}
    )


#: Variants on a Llama, with the outcome and what justifies it.
VARIANTS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "lora": (lora, "uses", ""),
    "lora_dropout": (lambda: lora(lora_dropout=0.1), "uses", ""),
    "lora_all_linear": (lambda: lora(target_modules="all-linear"), "uses", ""),
    "lora_rslora": (lambda: lora(use_rslora=True), "uses", ""),
    "lora_pissa": (lambda: lora(init_lora_weights="pissa"), "uses", ""),
    "lora_bias": (lambda: lora(bias="lora_only", lora_bias=True), "uses", ""),
    "lora_head_saved": (lambda: lora(modules_to_save=["lm_head"]), "uses", ""),
    "lora_embeddings": (lambda: lora(target_modules=["embed_tokens", "q_proj"]), "uses", ""),
    "lora_rank_pattern": (lambda: lora(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 4}), "uses", ""),
    "lora_layers_to_transform": (lambda: lora(layers_to_transform=[1]), "uses", ""),
    "lora_trainable_tokens": (lambda: lora(trainable_token_indices=[5, 6]), "uses", ""),
    "dora": (lambda: lora(use_dora=True), "uses", ""),
    "ia3": (
        lambda: peft.IA3Config(
            task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
        ),
        "uses",
        "",
    ),
    "prompt_tuning": (lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "uses", ""),
    "p_tuning": (
        lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8),
        "uses",
        "",
    ),
    "prefix_tuning": (lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "uses", ""),
    "loha": (
        lambda: peft.LoHaConfig(r=4, target_modules=_ATTENTION),
        "one-example",
        "a function of parameters with a backward pass of its own",
    ),
    "lokr": (lambda: peft.LoKrConfig(r=4, target_modules=_ATTENTION), "uses", ""),
    "vera": (lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]), "uses", ""),
    "layer_norm_tuning": (lambda: peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=["norm"]), "uses", ""),
    "hra": (lambda: peft.HRAConfig(r=4, target_modules=_ATTENTION), "uses", ""),
    "oft": (
        lambda: peft.OFTConfig(r=2, oft_block_size=0, target_modules=_ATTENTION),
        "one-example",
        "a rotation made of parameters",
    ),
    "boft": (
        lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj"]),
        "one-example",
        "a rotation made of parameters",
    ),
    "fourierft": (
        lambda: peft.FourierFTConfig(n_frequency=20, target_modules=_ATTENTION),
        "one-example",
        "a transform of parameters",
    ),
    "c3a": (
        lambda: peft.C3AConfig(block_size=8, target_modules=["q_proj"]),
        "one-example",
        "a transform of parameters",
    ),
}
for _name, (_config, _expect, _why) in VARIANTS.items():
    register(
        _name, lambda c=_config: Case(adapted(llama(num_key_value_heads=2), c()), id_rows(), causal), _expect, _why
    )


@program()
def lora_classifier() -> Case:
    """LoRA of BERT, whose head is trained as a whole."""
    config = peft.LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.1, target_modules=["query", "value"])
    return Case(adapted(bert(), config), labelled(), classify)


@program()
def lora_gpt2_conv1d() -> Case:
    """LoRA of GPT-2, whose projections are Conv1D."""
    return Case(adapted(gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True)), id_rows(), causal)


@program()
def dora_gpt2() -> Case:
    """DoRA of GPT-2."""
    config = lora(target_modules=["c_attn", "c_proj"], use_dora=True, fan_in_fan_out=True)
    return Case(adapted(gpt2(), config), id_rows(), causal)


@program()
def lora_t5() -> Case:
    """LoRA of an encoder-decoder model."""
    config = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", r=4, target_modules=["q", "v"])
    return Case(adapted(t5(), config), pair_rows(), translate)


@program()
def ia3_t5() -> Case:
    """IA3 of an encoder-decoder model."""
    config = peft.IA3Config(task_type="SEQ_2_SEQ_LM", target_modules=["k", "v", "wo"], feedforward_modules=["wo"])
    return Case(adapted(t5(), config), pair_rows(), translate)


@program()
def lora_checkpointing() -> Case:
    """LoRA with gradient checkpointing."""
    model = llama()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return Case(adapted(model, lora()), id_rows(), causal)


@program()
def lora_bfloat16_base() -> Case:
    """Float32 adapters on a bfloat16 model."""
    return Case(adapted(llama().to(torch.bfloat16), lora()), id_rows(), causal, exact=False)


@program()
def lora_two_adapters() -> Case:
    """A second adapter is added and active, the first one is kept."""
    model = adapted(llama(), lora())
    model.add_adapter("second", lora(r=2))
    model.set_adapter("second")
    return Case(model, id_rows(), causal)


@program()
def lora_merged_then_tuned() -> Case:
    """merge_and_unload, then full fine-tuning."""
    model = adapted(llama(), lora()).merge_and_unload()
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return Case(model, id_rows(), causal)


@program()
def bitfit() -> Case:
    """Biases and the head alone."""
    model = bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or "classifier" in name)
    return Case(model, labelled(), classify)


@program()
def last_layer() -> Case:
    """The last layer, pooler and head of BERT."""
    model = bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("layer.1", "pooler", "classifier")))
    return Case(model, labelled(), classify)


@program()
def lora_by_hand() -> Case:
    """A module of one's own that adds a product of two small matrices."""

    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, base.in_features))
            self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + x @ self.down.t() @ self.up.t()

    model = mlp()
    model[0], model[2] = Adapter(model[0]), Adapter(model[2])
    return Case(model, numbers(), None, crossentropy, options=MEAN)


@program()
def bottleneck_adapters() -> Case:
    """Houlsby's adapters behind each layer, by forward hooks."""
    model = bert()
    model.bert.requires_grad_(False)
    for number, layer in enumerate(model.bert.encoder.layer):
        adapter = nn.Sequential(nn.Linear(16, 4), nn.GELU(), nn.Linear(4, 16))
        model.add_module(f"adapter{number}", adapter)
        layer.output.register_forward_hook(lambda module, inputs, output, a=adapter: output + a(output))
    return Case(model, labelled(), classify)


@program("refused: AdaLoRA", "its ranks follow gradients, which would be released without noise")
def adalora() -> Case:
    """AdaLoRA, whose loop calls update_and_allocate."""
    config = peft.AdaLoraConfig(
        task_type="CAUSAL_LM",
        init_r=4,
        target_r=2,
        tinit=0,
        tfinal=1,
        deltaT=1,
        total_step=4,
        target_modules=_ATTENTION,
    )
    model = adapted(llama(), config)
    return Case(model, id_rows(), causal, after_step=lambda m, o, step: m.base_model.update_and_allocate(step + 1))
