"""The table of models: full fine-tuning, LoRA and BitFit of many architectures against one example at a time.

``python -m bench.models`` writes `docs/models.md` and `bench/results/models.json` from the root of a checkout; names of models
behind it print their rows alone. Every model is a small random one of transformers' own class, in float32 without dropout.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from fastdp.verify import Checks

from .fuzz import NotingPolicy, alone, apart, norms, summed
from .record import markdown, write

TUNINGS = ("full", "lora", "bitfit")
_ROWS, _TOKENS, _WORDS = 4, 11, 61
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL: dict[str, Any] = {
    **{"vocab_size": _WORDS, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    **_IDS,
}
_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
#: Settings of models with an encoder and a decoder, each a stack of layers.
_PAIR: dict[str, Any] = {
    **{"vocab_size": _WORDS, "d_model": 32, "max_position_embeddings": 64},
    **{f"{part}_{name}": count for part in ("encoder", "decoder") for name, count in _STACK.items()},
    **_IDS,
    **{"decoder_start_token_id": 2, "forced_eos_token_id": 2},
}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MANY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_IMAGE = {"image_size": 16, "patch_size": 4, "num_labels": 3}
_NO_LAYERS = {"num_attention_heads": None, "num_hidden_layers": None, "hidden_size": None}
_STAGES = {**_NO_LAYERS, "depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 2}

_PLAIN = {"num_key_value_heads": None}
_BERT = {**_PLAIN, "num_labels": 3}
_T5 = {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

#: Name, transformers' prefix of configuration and model, what the model does, and settings beside the small ones; None
#: takes one away. Those of the tests' matrix come first.
_LISTED: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("gpt2", "GPT2", "LMHeadModel", {**_PLAIN, **_GPT, "pad_token_id": None}),
    ("llama", "Llama", "CausalLM", {}),
    ("mistral", "Mistral", "CausalLM", {}),
    ("qwen3", "Qwen3", "CausalLM", _HEADS),
    ("gemma3", "Gemma3Text", "CausalLM", _HEADS),
    ("phi", "Phi", "CausalLM", _PLAIN),
    ("opt", "OPT", "CausalLM", {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    ("gpt-neox", "GPTNeoX", "CausalLM", _PLAIN),
    ("bert", "Bert", "SequenceClassification", _BERT),
    ("bert-mlm", "Bert", "MaskedLM", _BERT),
    ("roberta", "Roberta", "SequenceClassification", _BERT),
    (
        "distilbert",
        "DistilBert",
        "SequenceClassification",
        {**_PLAIN, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    ),
    ("electra", "Electra", "SequenceClassification", {**_PLAIN, "embedding_size": 16}),
    ("albert", "Albert", "SequenceClassification", {**_PLAIN, "embedding_size": 16}),
    ("t5", "T5", "ConditionalGeneration", {**_T5, "decoder_start_token_id": 0}),
    ("bart", "Bart", "ConditionalGeneration", {}),
    ("vit", "ViT", "ImageClassification", _IMAGE),
    ("gemma", "Gemma", "CausalLM", _HEADS),
    ("gemma2", "Gemma2", "CausalLM", _HEADS),
    ("qwen2", "Qwen2", "CausalLM", {}),
    ("phi3", "Phi3", "CausalLM", {}),
    ("olmo", "Olmo", "CausalLM", {}),
    ("olmo2", "Olmo2", "CausalLM", {}),
    ("starcoder2", "Starcoder2", "CausalLM", {}),
    ("stablelm", "StableLm", "CausalLM", {}),
    ("cohere", "Cohere", "CausalLM", {}),
    ("granite", "Granite", "CausalLM", {}),
    ("glm", "Glm", "CausalLM", _HEADS),
    ("glm4", "Glm4", "CausalLM", _HEADS),
    ("nemotron", "Nemotron", "CausalLM", {}),
    ("persimmon", "Persimmon", "CausalLM", {}),
    ("helium", "Helium", "CausalLM", _HEADS),
    ("smollm3", "SmolLM3", "CausalLM", {}),
    ("falcon", "Falcon", "CausalLM", {}),
    ("bloom", "Bloom", "CausalLM", {"n_layer": 2, "n_head": 4}),
    ("mpt", "Mpt", "CausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    ("gpt-bigcode", "GPTBigCode", "CausalLM", _GPT),
    ("gpt-neo", "GPTNeo", "CausalLM", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
    ("gptj", "GPTJ", "CausalLM", {**_GPT, "rotary_dim": 4}),
    ("codegen", "CodeGen", "CausalLM", {**_GPT, "rotary_dim": 4}),
    ("biogpt", "BioGpt", "CausalLM", {}),
    ("mixtral", "Mixtral", "CausalLM", _EXPERTS),
    ("qwen3-moe", "Qwen3Moe", "CausalLM", {**_MANY_EXPERTS, **_HEADS}),
    ("gpt-oss", "GptOss", "CausalLM", {**_EXPERTS, **_HEADS}),
    ("mamba", "Mamba", "CausalLM", {"state_size": 4}),
    ("mamba2", "Mamba2", "CausalLM", {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 4, "chunk_size": 4}),
    ("deberta-v2", "DebertaV2", "SequenceClassification", {"num_labels": 3}),
    ("mpnet", "MPNet", "SequenceClassification", {"num_labels": 3}),
    (
        "xlnet",
        "XLNet",
        "SequenceClassification",
        {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48, "num_labels": 3, "max_position_embeddings": None},
    ),
    ("modernbert", "ModernBert", "SequenceClassification", {"num_labels": 3, "cls_token_id": 1, "sep_token_id": 2}),
    ("xlm-roberta", "XLMRoberta", "MaskedLM", {}),
    ("fnet", "FNet", "SequenceClassification", {"num_labels": 3}),
    ("convbert", "ConvBert", "SequenceClassification", {"num_labels": 3, "embedding_size": 32}),
    ("mbart", "MBart", "ConditionalGeneration", {}),
    ("pegasus", "Pegasus", "ConditionalGeneration", {}),
    ("blenderbot", "Blenderbot", "ConditionalGeneration", {}),
    ("mt5", "MT5", "ConditionalGeneration", _T5),
    ("whisper", "Whisper", "Speech", {"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}),
    ("deit", "DeiT", "ImageClassification", _IMAGE),
    ("beit", "Beit", "ImageClassification", _IMAGE),
    ("dinov2", "Dinov2", "ImageClassification", _IMAGE),
    ("swin", "Swin", "ImageClassification", {**_IMAGE, **_STAGES}),
    (
        "convnext",
        "ConvNext",
        "ImageClassification",
        {**_NO_LAYERS, "num_labels": 3, "patch_size": 2, "hidden_sizes": [8, 16, 16, 32], "depths": [1] * 4},
    ),
)

_SUFFIX = {"ConditionalGeneration": "ForConditionalGeneration", "Speech": "ForConditionalGeneration"}
TASKS = {name: task for name, _, task, _ in _LISTED}


def small(name: str) -> torch.nn.Module:
    _, prefix, task, options = next(own for own in _LISTED if own[0] == name)
    base = _PAIR if task in _SUFFIX else _SMALL
    if task == "ImageClassification":
        base = {k: v for k, v in _SMALL.items() if k not in ("vocab_size", "num_key_value_heads")}
    settings = {name: value for name, value in {**base, **options}.items() if value is not None}
    config = getattr(hf, f"{prefix}Config")(**settings)
    suffix = _SUFFIX.get(task, task if task == "LMHeadModel" else f"For{task}")
    model: torch.nn.Module = getattr(hf, prefix.removesuffix("Text") + suffix)(config)
    return model


def _batch(task: str) -> dict[str, torch.Tensor]:
    """Rows of words, images or sounds, and their labels."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, _WORDS, (_ROWS, _TOKENS), generator=generator)
    if task == "ImageClassification":
        return {"pixel_values": torch.randn(_ROWS, 3, 16, 16, generator=generator), "labels": torch.arange(_ROWS) % 3}
    if task == "Speech":
        return {"input_features": torch.randn(_ROWS, 8, 16, generator=generator), "labels": ids}
    if task == "SequenceClassification":
        return {"input_ids": ids, "labels": torch.arange(_ROWS) % 3}
    return {"input_ids": ids, "labels": ids.clone()}


def cases() -> dict[str, tuple[Callable[[], torch.nn.Module], dict[str, torch.Tensor]]]:
    """By name, a function that builds the model, and its batch; the tests' own models keep the tests' batch."""
    from tests.engine.models import MODELS, batch

    return {
        name: (functools.partial(small, name), batch(name) if name in MODELS else _batch(task))
        for name, task in TASKS.items()
    }


def turn_dropout_off(model: torch.nn.Module) -> None:
    """Set every dropout rate to 0: of layers, and of attributes that a forward pass reads."""
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


def _tuned(model: torch.nn.Module, tuning: str) -> torch.nn.Module | None:
    """The model with its trained parameters chosen, dropout off, and every number moved off its initial value."""
    turn_dropout_off(model)
    if tuning == "lora":
        import peft

        # Of mixtures attention alone, as is usual: experts are adapted as single parameters, one example at a time.
        experts = any("experts" in name for name, _ in model.named_parameters())
        targets: Any = ["q_proj", "k_proj", "v_proj", "o_proj"] if experts else "all-linear"
        if "mamba" in type(model).__name__.lower():
            targets = ["in_proj", "x_proj"]
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    if tuning == "bitfit":
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("bias")
        if not any(p.requires_grad for p in model.parameters()):
            return None
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def row(build: Callable[[], torch.nn.Module], inputs: dict[str, torch.Tensor], tuning: str) -> dict[str, Any] | None:
    """One step's error, slack of the clip's bound, route and share of parameters on the fast route; None if none are trained."""
    from fastdp.engine.engine import Engine
    from fastdp.engine.uses.layout import Ticket

    torch.manual_seed(0)
    model = _tuned(build(), tuning)
    if model is None:
        return None
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    exact = copy.deepcopy(model).double()
    if hasattr(exact.config, "_experts_implementation"):
        # Torch's grouped product knows no float64; the plain loop over experts does.
        exact.config._experts_implementation = "eager"
    wanted = alone(exact, inputs)
    sizes = norms(wanted)
    bound = float(sizes.median())
    tickets = deque([Ticket(torch.arange(_ROWS), torch.ones(_ROWS), is_last=True)])
    policy = NotingPolicy((bound,), (0.0,), dict.fromkeys(trained, 0))
    engine = Engine(model, policy, tickets, verify=Checks)
    try:
        model(**inputs).loss.backward()
        sums, routes = engine.accumulator.sums, engine.accumulator.routes
        found = torch.cat([sums.get(n, torch.zeros_like(p)).double().flatten() for n, p in trained.items()])
        seen, given = policy.latest(_ROWS, engine.route)
        error = max(apart(found, summed(wanted, given)), float((seen / sizes - 1).abs().max()))
        slack = float((1 - given / (bound / sizes).clamp(max=1)).max())
        slow = {n for n, p in trained.items() if n in routes and routes[n].name == "expanded" and p.dim() > 1}
        slow = set(trained) if engine.route != "uses" else slow
        share = 1 - sum(trained[n].numel() for n in slow) / sum(p.numel() for p in trained.values())
        return {"error": error, "slack": slack, "route": engine.route, "fast": share, "reason": engine.reason}
    finally:
        engine.close()


def measured(case: Any, tuning: str) -> dict[str, Any] | None:
    """`row` of a case, or the sentence that it was refused with."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            build, inputs = case
            return row(build, inputs, tuning)
    except Exception as error:
        return {"refused": str(error).splitlines()[0]}


def _cell(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no biases"
    if "refused" in found:
        return "refused"
    kind = f"{found['error']:.0e}/{found['slack']:.0e}"
    if found["route"] != "uses":
        return f"{kind}, one example"
    return f"{kind}, {100 * found['fast']:.0f}%"


def page(figures: dict[str, dict[str, Any]]) -> str:
    lines = [
        "# Models",
        "",
        "Written by `python -m bench.models`. Each model is a small random one of transformers' own class, in float32: four",
        "rows, one step. Before the slash: the error of per-example norms, and of the sum by the clip's scales, against float64",
        "autograd of one example at a time. Behind it: what scales lose, as the clip divides by a proven bound of each norm",
        "([clipping.md](clipping.md)). The share is that of trained parameters whose per-example gradients come from factor",
        "pairs, sums over tokens or small instances in one backward pass. *One example*: the model takes the one-example route,",
        "exact for any model and several times slower.",
        "",
    ]
    rows = ([name, *(_cell(own[tuning]) for tuning in TUNINGS)] for name, own in figures.items())
    lines += markdown(["model", "full", "LoRA (all linear layers)", "biases"], rows)
    reasons: dict[str, list[str]] = {}
    for name, own in figures.items():
        for tuning, found in own.items():
            why = found and (found.get("refused") or found.get("reason"))
            if why:
                reasons.setdefault(why, []).append(f"{name} ({tuning})")
    if reasons:
        lines += ["", "## Why not faster", ""]
        lines += [f"- {', '.join(who)}: {why}" for why, who in reasons.items()]
    return "\n".join(lines) + "\n"


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    known, figures = cases(), {}
    for name in chosen or known:
        figures[name] = {tuning: measured(known[name], tuning) for tuning in TUNINGS}
        print(name, json.dumps(figures[name]), flush=True)
    if not chosen:
        write("bench/results/models.json", figures)
        Path("docs/models.md").write_text(page(figures))


if __name__ == "__main__":
    main(sys.argv[1:])
