"""Models and steps that are measured, and that are simulated: a case says which, at which size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from . import layers

LEARNING_RATE = 1e-4
#: Projections of attention, which LoRA of rank 4 adapts where a case says no more than "lora".
_ATTENTION = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "bert": ["query", "value"]}
_ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Args:
        kind: gpt2, llama, mixtral, qwen3-moe, gemma3, bert, vit, or one of `bench.layers.KINDS`.
        feed_forward, heads, key_heads: four times the width, one for 64 of it, and as many, where they are 0.
        rank: of LoRA on all linear layers of a Llama.
        dropout: of BERT and GPT-2.
        dtype: of what is not adapted.
        tuning: full, lora (of attention, rank 4) or bitfit, without a rank.
        tied: whether the head of a Llama is its table of embeddings.
        masked: whether batches carry an attention mask of ones, as tokenizers make it.
        half_adapters: whether adapters have the case's dtype; PEFT makes them in float32.
        four_bits: whether layers with adapters are `FourBitLinear`, as QLoRA's are.
        logical: rows of a logical batch, in microbatches of ``rows``; private steps draw it by Poisson sampling. 0 for ``rows``
            at a time, in shuffled order.
        batches: of an epoch.
    """

    kind: str
    layers: int
    width: int
    feed_forward: int = 0
    heads: int = 0
    key_heads: int = 0
    vocabulary: int = 8192
    rows: int = 8
    tokens: int = 128
    rank: int = 0
    checkpointed: bool = False
    dropout: float = 0.1
    dtype: torch.dtype = torch.float32
    tuning: str = "full"
    tied: bool = False
    masked: bool = False
    half_adapters: bool = False
    four_bits: bool = False
    logical: int = 0
    batches: int = 4

    @property
    def gpu(self) -> bool:
        """Whether it is of a size for GPUs, in half precision."""
        return self.dtype != torch.float32


def build(case: Case, device: torch.device) -> torch.nn.Module:
    """The case's model in training mode, made where it will be and as it will be: a GPU need not hold it in float32."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(case.dtype)
    try:
        with device:
            model = _made(case)
    finally:
        torch.set_default_dtype(usual)
    if hasattr(model, "config"):
        model.config.use_cache = False  # type: ignore[union-attr] # as transformers' Trainer does
    with device:
        model = _tuned(case, model)
    if case.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        if case.rank:
            model.enable_input_require_grads()  # type: ignore[operator]
    return model.train()


def _made(case: Case) -> torch.nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    if case.kind in layers.KINDS:
        return layers.KINDS[case.kind](case.vocabulary, case.width, case.layers)
    heads, wide = case.heads or max(1, case.width // 64), case.feed_forward or 4 * case.width
    if case.kind == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), case.dropout)
        own = {"n_layer": case.layers, "n_embd": case.width, "n_head": heads, "n_positions": case.tokens}
        ids = {"vocab_size": case.vocabulary, "bos_token_id": 0, "eos_token_id": 0}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**own, **ids, **rates))
    shape: dict[str, Any] = {
        "num_hidden_layers": case.layers,
        "hidden_size": case.width,
        "intermediate_size": wide,
        "num_attention_heads": heads,
    }
    if case.kind == "vit":
        return hf.ViTForImageClassification(hf.ViTConfig(num_labels=10, **shape))
    shape |= {"vocab_size": case.vocabulary, "max_position_embeddings": case.tokens}
    if case.kind == "bert":
        rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), case.dropout)
        return hf.BertForSequenceClassification(hf.BertConfig(num_labels=2, **rates, **shape))
    shape["num_key_value_heads"] = case.key_heads or heads
    if case.kind == "gemma3":
        # Its head is the table of the embeddings.
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(head_dim=256, pad_token_id=None, **shape))
    shape["tie_word_embeddings"] = case.tied
    if case.kind == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=8, num_experts_per_tok=2, **shape))
    if case.kind == "qwen3-moe":
        own = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": wide, "head_dim": 64}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**own, **shape))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**shape))


def _tuned(case: Case, model: torch.nn.Module) -> torch.nn.Module:
    if case.tuning == "bitfit":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.endswith(".bias"))
    if case.tuning != "lora" and not case.rank:
        return model
    import peft

    targets, rank = (_ALL, case.rank) if case.rank else (_ATTENTION[case.kind], 4)
    config = peft.LoraConfig(r=rank, target_modules=targets, fan_in_fan_out=case.kind == "gpt2", task_type="CAUSAL_LM")
    kept = not case.half_adapters
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=kept)  # type: ignore[arg-type, assignment]
    for module in [own for own in model.modules() if case.four_bits and hasattr(own, "base_layer")]:
        module.base_layer = FourBitLinear(module.base_layer)  # type: ignore[arg-type]
    return model


#: Weights that share a scale.
_BLOCK = 64


@torch.library.custom_op("fastdp_bench::dequantize", mutates_args=())
def dequantize(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    """A weight of so many rows from two codes a byte, in the dtype of the scales: one launch, as bitsandbytes makes it."""
    both = torch.stack([codes >> 4, codes & 15], 1).view(-1, _BLOCK)
    return ((both - 7.5) * scales.float().unsqueeze(1)).to(scales.dtype).view(rows, -1)


@dequantize.register_fake
def _(codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
    return scales.new_empty(rows, 2 * len(codes) // rows)


class _FourBitProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.rows = rows
        return torch.nn.functional.linear(x, dequantize(codes, scales, rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] @ dequantize(*ctx.saved_tensors, ctx.rows), None, None, None


class FourBitLinear(torch.nn.Linear):
    """A stand-in for bitsandbytes' frozen linear layers: four bits a weight, made whole in each pass and not kept."""

    scales: torch.Tensor

    def __init__(self, plain: torch.nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        blocks = plain.weight.detach().view(-1, _BLOCK)
        self.register_buffer("scales", blocks.abs().amax(1) / 7.5)
        codes = (blocks / self.scales.unsqueeze(1) + 7.5).round_().clamp_(0, 15).to(torch.uint8).view(-1, 2)
        self.weight = torch.nn.Parameter((codes[:, 0] << 4) | codes[:, 1], requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _FourBitProduct.apply(input, self.weight, self.scales, self.out_features)


def examples(case: Case, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if case.kind == "vit":
        images = torch.randn(count, 3, 224, 224, generator=generator)
        labels = torch.randint(0, 10, (count,), generator=generator)
        return [{"pixel_values": image, "labels": label} for image, label in zip(images, labels)]
    if case.kind == "cnn":
        seen = torch.randn(count, 3, case.tokens, case.tokens, generator=generator)
        return [{"x": image, "labels": torch.tensor(i % layers.CLASSES)} for i, image in enumerate(seen)]
    ids = torch.randint(0, case.vocabulary, (count, case.tokens), generator=generator)
    if case.kind in layers.KINDS:
        return [{"x": row, "labels": torch.tensor(i % layers.CLASSES)} for i, row in enumerate(ids)]
    if case.kind == "bert":
        labels = torch.randint(0, 2, (count,), generator=generator)
        rows = [{"input_ids": row, "labels": label} for row, label in zip(ids, labels)]
    else:
        rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    return [row | {"attention_mask": torch.ones_like(row["input_ids"])} for row in rows] if case.masked else rows


_half = functools.partial(Case, dtype=torch.bfloat16)
#: Steps that take a GPU, or are simulated: first those whose figures are the most wanted.
LARGE = {
    "llama-1b-full-checkpointed": _half("llama", 16, 2048, 8192, 32, 8, 128256, 4, 1024, checkpointed=True),
    "llama-1b-full-checkpointed-16x2048": _half("llama", 16, 2048, 8192, 32, 8, 128256, 16, 2048, checkpointed=True),
    "llama-1b-lora-checkpointed-12x512": _half(
        "llama", 16, 2048, 8192, 32, 8, 128256, 12, 512, rank=16, checkpointed=True
    ),
    "llama-1b-long-2": _half("llama", 16, 2048, 8192, 32, 8, 128256, 2, 4096),
    "bert-base-masked": _half("bert", 12, 768, 3072, 12, 12, 30522, 32, 128, masked=True),
    "gemma3-1b-full": _half("gemma3", 26, 1152, 6912, 4, 1, 262144, 8, 512),
    "llama-1b-tied": _half("llama", 16, 2048, 8192, 32, 8, 128256, 4, 1024, tied=True),
    "bert-base-full": _half("bert", 12, 768, 3072, 12, 12, 30522, 32, 128),
    "gpt2-124m-full": _half("gpt2", 12, 768, 3072, 12, 12, 50257, 8, 1024),
    "llama-1b-full": _half("llama", 16, 2048, 8192, 32, 8, 128256, 4, 1024),
    "llama-8b-lora-half": _half("llama", 32, 4096, 14336, 32, 8, 128256, 4, 2048, rank=16, half_adapters=True),
    "llama-8b-lora-checkpointed": _half("llama", 32, 4096, 14336, 32, 8, 128256, 4, 2048, rank=16, checkpointed=True),
    "llama-1b-long": _half("llama", 16, 2048, 8192, 32, 8, 128256, 1, 4096),
    "llama-8b-lora": _half("llama", 32, 4096, 14336, 32, 8, 128256, 4, 2048, rank=16),
}


def batches(loader: Any, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of a loader on the device, pass after pass."""
    while True:
        for batch in loader:
            yield {key: value.to(device, non_blocking=True) for key, value in batch.items()}


def loader_of(case: Case, *, shuffle: bool = False) -> Any:
    from torch.utils.data import DataLoader

    size = case.logical if case.logical and not shuffle else case.rows
    return DataLoader(examples(case, case.batches * (case.logical or case.rows)), batch_size=size, shuffle=shuffle)  # type: ignore[arg-type]


def plain_step(case: Case, model: torch.nn.Module, *, fused: bool) -> Callable[[], int]:
    """A function that takes one training step without privacy, with torch's AdamW; it returns the number of microbatches."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=fused or None)
    stream = batches(loader_of(case, shuffle=True), trained[0].device)
    parts = max(1, case.logical // case.rows)

    def step() -> int:
        for _ in range(parts):
            (model(**next(stream)).loss / parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        return parts

    return step


def captured_step(case: Case, model: torch.nn.Module) -> Callable[[], None]:
    """`plain_step` with torch's fused AdamW whose passes are recorded as a CUDA graph, as torch's own documents do it."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=True)
    stream = batches(loader_of(case, shuffle=True), trained[0].device)
    held = next(stream)
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            optimizer.zero_grad()
            model(**held).loss.backward()
    torch.cuda.current_stream().wait_stream(aside)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(**held).loss.backward()
    # What the graph reads has to outlive this call; the optimizer holds no buffers.
    kept = list(model.buffers())

    def step() -> None:
        for key, value in next(stream).items():
            held[key].copy_(value)
        graph.replay()
        optimizer.step()

    step.kept = kept  # type: ignore[attr-defined]
    return step


def private_step(
    case: Case,
    model: torch.nn.Module,
    *,
    fused: bool,
    capture: bool | str = False,
    self_check: bool = False,
    **options: Any,
) -> Callable[[], int]:
    """A function that takes one private step, with torch's AdamW or that which fuses noise and update.

    Moments of both are kept in the case's dtype, as torch keeps them. ``options`` are those of its run, ``private``.
    """
    import fastdp

    privacy: dict[str, Any] = {"noise_multiplier": 1.0, "target_delta": 1e-5, "epochs": 10_000, "sampling": "shuffled"}
    if case.logical:
        privacy |= {"sampling": "poisson", "epochs": 100, "unsafe_seed": 1, "max_physical_batch_size": case.rows}
    # Some later batches are verified, at most 1% of a run (`fastdp.verify`), and single steps would bear that time.
    privacy |= {"self_check": self_check, **options}
    trained = [p for p in model.parameters() if p.requires_grad]
    if fused:
        optimizer: torch.optim.Optimizer = fastdp.optim.AdamW(trained, lr=LEARNING_RATE, moments=case.dtype)
    else:
        optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    private = fastdp.make_private(model, optimizer, loader_of(case), capture=capture, **privacy)
    stream = batches(private.data_loader, trained[0].device)

    def step() -> int:
        parts, done = 0, False
        while not done:
            model(**next(stream)).loss.backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            parts, done = parts + 1, private.last_step_done
        return parts

    step.private = private  # type: ignore[attr-defined]
    return step
