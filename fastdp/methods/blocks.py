"""Where the blocks of a stock transformer are: the places at which its forward pass can be cut or perturbed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn


@dataclass(frozen=True)
class _Layout:
    """Paths below the base model: to the module that gives the first hidden state, those it is made with, and the rest."""

    embeddings: str
    stage: tuple[str, ...]
    blocks: str
    #: The norm after the last block.
    final: str | None
    causal: bool
    #: What follows the embeddings where these are narrower than the hidden state.
    projection: str | None = None
    #: Whether a block returns its hidden state in a tuple.
    tuples: bool = False
    #: What all blocks read besides their input.
    shared: str | None = None


_BERT = _Layout("embeddings", ("embeddings",), "encoder.layer", None, causal=False)
_GPT2 = _Layout("drop", ("wte", "wpe", "drop"), "h", "ln_f", causal=True)
_LLAMA = _Layout("embed_tokens", ("embed_tokens",), "layers", "norm", causal=True)
_DECODERS = (
    "llama mistral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi3 olmo olmo2 olmoe starcoder2 stablelm cohere "
    "granite smollm3 mixtral gpt_oss helium arcee glm glm4 nemotron ministral seed_oss exaone4"
)
_LAYOUTS = {
    **dict.fromkeys("bert roberta xlm-roberta camembert data2vec-text ernie".split(), _BERT),
    "megatron-bert": replace(_BERT, final="encoder.ln", tuples=True),
    "mpnet": replace(_BERT, shared="encoder.relative_attention_bias", tuples=True),
    "electra": replace(_BERT, projection="embeddings_project"),
    "roformer": replace(_BERT, projection="embeddings_project", tuples=True),
    "distilbert": replace(_BERT, blocks="transformer.layer"),
    "modernbert": replace(_BERT, blocks="layers", final="final_norm"),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    "gpt_neo": replace(_GPT2, tuples=True),
    **dict.fromkeys(("gptj", "codegen"), replace(_GPT2, stage=("wte", "drop"), tuples=True)),
    **dict.fromkeys(_DECODERS.split(), _LLAMA),
    "phi": replace(
        _LLAMA, embeddings="embed_dropout", stage=("embed_tokens", "embed_dropout"), final="final_layernorm"
    ),
    "gpt_neox": _Layout("emb_dropout", ("embed_in", "emb_dropout"), "layers", "final_layer_norm", causal=True),
    "falcon": _Layout("word_embeddings", ("word_embeddings",), "h", "ln_f", causal=True, tuples=True),
}
#: ``embeddings`` (0), the number of a block counted from 1, ``output``; or a module of the model, or its dotted name.
Layer: TypeAlias = int | str | nn.Module
#: What transformers calls the models whose blocks are known.
MODEL_TYPES = tuple(_LAYOUTS)


@dataclass(frozen=True)
class Blocks:
    """The parts of a stock model, from its input to its last hidden state, in the words of `_Layout`.

    Attributes:
        model: the transformers model, out of any PEFT wrapper.
        base: the model without its head; it may be ``model`` itself.
        causal: whether a block attends to earlier positions only.
        known: whether the architecture is a stock one. Of another, ``embeddings`` is the module that the user named, and
            there are no blocks.
    """

    model: nn.Module
    base: nn.Module
    embeddings: nn.Module
    stage: tuple[nn.Module, ...]
    blocks: nn.ModuleList
    final: nn.Module | None
    causal: bool = False
    tuples: bool = False
    shared: nn.Module | None = None
    known: bool = True

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state; raises ValueError where the model's config does not say."""
        width = getattr(getattr(self.base, "config", None), "hidden_size", None)
        if width is None:
            raise ValueError(
                "the width of this model's hidden states is not known: pass autoencoder=StackedAutoencoder(width, sizes), or None"
            )
        return int(width)

    def place(self, layer: Layer) -> tuple[int, nn.Module]:
        """Blocks before a layer, and the module whose output is the hidden state there. Raises as `number`."""
        number = self.number(layer) if self.known else 0
        if number in ("embeddings", 0):
            return 0, self.embeddings
        if number == "output":
            return len(self.blocks), self.blocks[-1] if self.final is None else self.final
        return int(number), self.blocks[int(number) - 1]

    def number(self, layer: Layer) -> int | str:
        """``embeddings`` (or 0), the number of a block, or ``output``, of a layer in any of its forms."""
        if layer in ("embeddings", "output") or (type(layer) is int and 0 <= layer <= len(self.blocks)):
            return layer  # type: ignore[return-value]
        module = layer if isinstance(layer, nn.Module) else dict(self.model.named_modules()).get(str(layer))
        places: list[tuple[int | str, nn.Module | None]] = [
            ("embeddings", self.embeddings),
            *enumerate(self.blocks, 1),
            ("output", self.final),
        ]
        for number, place in places:
            if place is not None and place is module:
                return number
        raise ValueError(
            f"layer is {_shown(layer)}: this model has 'embeddings' (or 0), blocks 1 to {len(self.blocks)}, and 'output' to "
            "choose from, or the module of one of them"
        )

    def before(self, layer: Layer) -> Iterator[nn.Module]:
        """The modules that compute the hidden state at a layer."""
        count, module = self.place(layer)
        yield from self.stage
        yield from self.blocks[:count]
        if count and self.shared is not None:
            yield self.shared
        if module is self.final:
            yield self.final


def find_blocks(model: nn.Module, layer: Layer | None = None) -> Blocks:
    """The parts of a stock model, with any head or none, PEFT-wrapped or not.

    Another architecture is known at one ``layer`` alone: the module, or its dotted name, at which it is to be perturbed.
    """
    wrapper: Any = model
    if hasattr(wrapper, "get_base_model"):
        model = wrapper.get_base_model()
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    layout = _LAYOUTS.get(kind)
    if layout is None:
        if isinstance(layer, nn.Module) or (isinstance(layer, str) and layer not in ("embeddings", "output")):
            return _at_module(model, layer)
        raise ValueError(
            f"The blocks of a {kind} model are not known. Give a stock transformers model such as BERT or Llama, or with EWFT "
            "layer=model.get_submodule(NAME)."
        )
    base: Any = getattr(model, "base_model", model)
    if layout.projection is not None and hasattr(base, layout.projection):
        layout = replace(layout, embeddings=layout.projection, stage=(*layout.stage, layout.projection))
    return Blocks(
        model=model,
        base=base,
        embeddings=base.get_submodule(layout.embeddings),
        stage=tuple(base.get_submodule(path) for path in layout.stage),
        blocks=base.get_submodule(layout.blocks),
        final=None if layout.final is None else base.get_submodule(layout.final),
        causal=layout.causal or bool(getattr(model.config, "is_decoder", False)),
        tuples=layout.tuples,
        shared=None if layout.shared is None else base.get_submodule(layout.shared),
    )


def layer_name(model: nn.Module, layer: Layer) -> int | str:
    """A layer as settings, a ledger and a card keep it: as `Blocks.number` says, or a dotted name in another architecture."""
    blocks = find_blocks(model, layer)
    if blocks.known:
        return blocks.number(layer)
    return next(name for name, module in blocks.model.named_modules() if module is blocks.embeddings)


def _at_module(model: nn.Module, layer: str | nn.Module) -> Blocks:
    """A model whose architecture is not known, at one module: what it registers before that counts as computed before."""
    module = layer if isinstance(layer, nn.Module) else dict(model.named_modules()).get(layer)
    if module is None or module is model or all(module is not own for own in model.modules()):
        raise ValueError(f"layer {_shown(layer)} is not a module of this model: print(model) shows their names")
    before = itertools.takewhile(lambda own: own is not module, model.modules())
    # What holds the layer is computed after it, too.
    stage = tuple(own for own in before if module not in own.modules())
    return Blocks(model, model, module, (*stage, module), nn.ModuleList(), None, known=False)


def _shown(layer: Layer) -> str:
    return type(layer).__name__ if isinstance(layer, nn.Module) else repr(layer)
