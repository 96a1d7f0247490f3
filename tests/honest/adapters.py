"""Parameter-efficient tuning: every method of peft that ordinary scripts use."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import peft
import torch
from opacus.layers import DPMultiheadAttention
from torch import nn

from . import kit
from .harness import Case, Run, program, register, register_all

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
    settings = {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": _ATTENTION, **options}
    return peft.LoraConfig(**settings)


def tuned(config: Any) -> Case:
    """A Llama with adapters."""
    return Case(adapted(kit.llama(num_key_value_heads=2), config), kit.id_rows(), kit.causal)


#: Arguments of LoRA.
LORA: dict[str, dict[str, Any]] = {
    "lora": {},
    "lora_dropout": {"lora_dropout": 0.1},
    "lora_ranks": {"rank_pattern": {"q_proj": 2}},
    "lora_head_saved": {"modules_to_save": ["lm_head"]},
    "lora_embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "lora_trainable_tokens": {"trainable_token_indices": [5, 6]},
    "dora": {"use_dora": True},
}
register_all(LORA, lambda options: tuned(lora(**options)))

_TASK = {"task_type": "CAUSAL_LM"}
_QV = {"r": 4, "target_modules": _ATTENTION}
_SCALED = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
#: Other methods: the class of their configuration and its arguments.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "ia3": ("IA3", {**_TASK, **_SCALED}),
    "prompt_tuning": ("PromptTuning", {**_TASK, "num_virtual_tokens": 3}),
    "prefix_tuning": ("PrefixTuning", {**_TASK, "num_virtual_tokens": 3}),
    "lokr": ("LoKr", _QV),
    "vera": ("Vera", {"r": 4, "target_modules": ["q_proj"]}),
    "vector_bank": ("VBLoRA", {**_QV, "vector_length": 8, "num_vectors": 8, "topk": 2}),
    "reflections": ("HRA", _QV),
    "shared_shards": ("Miss", _QV),
    "layer_norm_tuning": ("LNTuning", {**_TASK, "target_modules": ["norm"]}),
}
#: Methods that multiply by a matrix made of parameters, whose factors no product of activations gives.
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "loha": ("LoHa", _QV),
    "oft": ("OFT", {"r": 2, "oft_block_size": 0, "target_modules": _ATTENTION}),
    "boft": ("BOFT", {"boft_block_size": 4, "target_modules": _ATTENTION}),
    "circular_convolutions": ("C3A", {"block_size": 4, "target_modules": _ATTENTION}),
    "random_bases": ("RandLora", {"r": 4, "target_modules": ["q_proj"]}),
    "spectral": ("FourierFT", {"n_frequency": 20, "target_modules": _ATTENTION}),
}


def configured(method: tuple[str, dict[str, Any]]) -> Case:
    """A Llama tuned by a method."""
    return tuned(getattr(peft, f"{method[0]}Config")(**method[1]))


register_all(METHODS, configured)
register_all(MADE, configured, expect="one-example", why="the method makes a matrix of its parameters")


_TASKS: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_tasks": 2}
#: Methods whose rows each name their task; Poly draws its mixture of skills anew in each pass.
BY_TASK: dict[str, tuple[Any, bool]] = {
    "skills_by_task": (peft.PolyConfig(task_type="CAUSAL_LM", r=4, target_modules=_ATTENTION, n_tasks=2), False),
    "prompt_by_task": (peft.MultitaskPromptTuningConfig(num_virtual_tokens=3, **_TASKS), True),
}


def _by_task(method: tuple[Any, bool]) -> Case:
    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {**kit.causal(rows), "task_ids": torch.tensor([len(row["input_ids"]) % 2 for row in rows])}

    return Case(adapted(kit.llama(num_key_value_heads=2), method[0]), kit.id_rows(), collate, exact=method[1])


register_all(BY_TASK, _by_task)


def _shared_experts(**options: Any) -> Case:
    case = tuned(peft.LilyConfig(task_type="CAUSAL_LM", r=4, num_B=2, target_modules=_ATTENTION))
    return dataclasses.replace(case, options=options)


_AVERAGED = "Lily's router averages its weights over all tokens of a pass"
register("shared_experts", _shared_experts, "refused: alone", _AVERAGED)
register("shared_experts_isolated", lambda: _shared_experts(isolation="per_example"), "one-example", _AVERAGED)


@program()
def lora_checkpointing() -> Case:
    model = kit.llama()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return Case(adapted(model, lora()), kit.id_rows(), kit.causal)


@program()
def bitfit() -> Case:
    model = kit.bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name or "classifier" in name)
    return Case(model, kit.labelled(), kit.classify)


@program()
def last_layer() -> Case:
    model = kit.bert()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in ("layer.1", "pooler", "classifier")))
    return Case(model, kit.labelled(), kit.classify)


@program()
def bottleneck_adapters() -> Case:
    """Houlsby's adapters behind each layer, by forward hooks."""
    model = kit.bert()
    model.bert.requires_grad_(False)
    for number, layer in enumerate(model.bert.encoder.layer):
        adapter = nn.Sequential(nn.Linear(16, 4), nn.GELU(), nn.Linear(4, 16))
        model.add_module(f"adapter{number}", adapter)
        layer.output.register_forward_hook(lambda module, inputs, output, a=adapter: output + a(output))
    return Case(model, kit.labelled(), kit.classify)


@program("refused: AdaLoRA", "its ranks follow gradients, which would be released without noise")
def adalora() -> Case:
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
    model = adapted(kit.llama(), config)
    return Case(
        model, kit.id_rows(), kit.causal, after_step=lambda m, o, step: m.base_model.update_and_allocate(step + 1)
    )


@program()
def lora_two_in_turn() -> Case:
    """Two adapters of one model, each trained by a run of its own."""

    def loop(run: Run) -> None:
        model = run.case.model
        for name in ("default", "second"):
            model.set_adapter(name)
            if run.private is not None:
                run.private.detach()
            _, optimizer, loader = run.start()
            for batch in loader:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    model = adapted(kit.llama(), lora())
    model.add_adapter("second", lora(r=2))
    return Case(model, kit.id_rows(), kit.causal, loop=loop)


def _attentive(attention: nn.Module, targets: list[str]) -> Case:
    """A classifier with attention over three views of a row, time first, and LoRA on some of its modules."""

    def forward(self: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(torch.stack([x, x.flip(1), x.roll(1, 1)]))
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return nn.functional.cross_entropy(self.head(hidden.mean(0)), labels)

    model = kit.Wrapped(forward, inner=nn.Linear(12, 16), attention=attention, head=nn.Linear(16, 3))
    return Case(adapted(model, peft.LoraConfig(target_modules=targets)), kit.numbers(), None, kit.unpack)


def _multihead(targets: list[str]) -> Case:
    return _attentive(nn.MultiheadAttention(16, 4), targets)


register(
    "lora_multihead_attention",
    lambda: _multihead(["attention"]),
    "refused: leave it out of target_modules or adapt opacus.layers.DPMultiheadAttention",
    "peft's layer writes frozen weights in each forward",
)
register("lora_beside_multihead_attention", lambda: _multihead(["inner", "head"]))
register("lora_dp_multihead_attention", lambda: _attentive(DPMultiheadAttention(16, 4), ["qlinear", "vlinear"]))


#: Programs of one line.
ONE_LINE: dict[str, Any] = {
    "lora_gpt2_conv1d": lambda: Case(
        adapted(kit.gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True)), kit.id_rows(), kit.causal
    ),
    "lora_bfloat16_base": lambda: Case(
        adapted(kit.llama().to(torch.bfloat16), lora()), kit.id_rows(), kit.causal, exact=False
    ),
}
register_all(ONE_LINE, lambda build: build())
