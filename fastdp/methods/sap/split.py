"""Cutting a stock model in two: a bottom for the customer, a top for the vendor (section 4.2).

Each half is the stock model, in which modules pass on what they are given where those of the other half were. So keys of the
state dict and the names that adapters target stay those of the whole model.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fastdp.methods.blocks import Blocks, Layer, find_blocks


class PassThrough(nn.Module):
    """In place of a block that the other half runs: hands on its hidden state, in a tuple if the block returns one."""

    def __init__(self, block: nn.Module, tuples: bool):
        super().__init__()
        self._tuples = tuples
        # Models ask their blocks which mask they want.
        self.attention_type = getattr(block, "attention_type", None)

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states,) if self._tuples else hidden_states


class HiddenStateInput(nn.Module):
    """In place of the module that makes a model's first hidden state in the top: that arrives ready, as ``inputs_embeds``."""

    def __init__(self, embeddings: nn.Module):
        super().__init__()
        # The vendor's own table, under its own name: heads may be tied to it.
        for name in ("word_embeddings", "tok_embeddings"):
            if hasattr(embeddings, name):
                setattr(self, name, getattr(embeddings, name))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3:
                return value
        raise ValueError("the top of a split model takes hidden states: pass inputs_embeds, not input_ids")


class ZeroPositions(nn.Module):
    """In place of a table of positions in the top: the hidden state has its positions already."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """Zeros [1, T, 1], whole numbers so that a sum keeps the dtype of the hidden state."""
        return torch.zeros_like(position_ids)[..., None]


class Bottom(nn.Module):
    """The customer's half: model inputs to the hidden state [B, T, d] after the last of its blocks."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **inputs).last_hidden_state


def split_model(model: nn.Module, after: Layer = 0) -> tuple[Bottom, nn.Module]:
    """Bottom and top of a stock model whose blocks are known (`fastdp.methods.blocks`).

    The bottom is a frozen copy of the embeddings and the first ``after`` blocks; 0 cuts at the embedding output, and a module
    or its dotted name stands for itself and what precedes it. The top shares its weights with ``model`` and has the head:
    ``top(inputs_embeds=bottom(**inputs), attention_mask=mask)`` computes what the model does. A causal classifier then reads
    the last position: pad on the left.
    """
    blocks = find_blocks(model)
    if isinstance(after, (str, nn.Module)):
        after = blocks.number(after)
        after = 0 if after == "embeddings" else after
    if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after <= len(blocks.blocks):
        raise ValueError(f"after is {after!r}: the model has 0 to {len(blocks.blocks)} blocks to split after")
    return _bottom(blocks, after).requires_grad_(False), _top(blocks, after)


def _bottom(blocks: Blocks, after: int) -> Bottom:
    memo: dict[int, Any] = {id(block): PassThrough(block, blocks.tuples) for block in blocks.blocks[after:]}
    pooler = getattr(blocks.base, "pooler", None)
    if blocks.final is not None:
        memo[id(blocks.final)] = nn.Identity()
    if pooler is not None:
        # Neither copied nor run: a customer needs none.
        memo[id(pooler)] = nn.Identity()
    base: Any = copy.deepcopy(blocks.base, memo)
    if pooler is not None:
        base.pooler = None
    base.config.use_cache = False
    return Bottom(base)


def _top(blocks: Blocks, after: int) -> nn.Module:
    memo: dict[int, Any] = {id(block): PassThrough(block, blocks.tuples) for block in blocks.blocks[:after]}
    table, *later = blocks.stage
    if not isinstance(table, nn.Embedding):
        memo[id(table)] = HiddenStateInput(table)
    for module in later:
        memo[id(module)] = ZeroPositions() if isinstance(module, nn.Embedding) else nn.Identity()
    # Weights are shared, not copied: a vendor's model may fill its memory.
    memo |= {id(p): p for p in blocks.model.parameters()}
    top: Any = copy.deepcopy(blocks.model, memo)
    top.config.use_cache = False
    return top
