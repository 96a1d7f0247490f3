"""Keeping the lengths of sequences from the half of the model that the server runs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "attention_mask"


def argument(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name: str = _NAME) -> Any:
    """The value of an argument that a module is being called with, by position or by name; None without it."""
    position = _position(module, args, name)
    return kwargs.get(name, None if position is None else args[position])


def _position(module: nn.Module, args: tuple[Any, ...], name: str) -> int | None:
    """Where an argument stands that is given by position; None if it is not."""
    names = list(inspect.signature(module.forward).parameters)
    return names.index(name) if name in names[: len(args)] else None


def hide_padding(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], causal: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with an attention mask in which no position is padding."""
    mask = full_mask(argument(module, args, kwargs), causal)
    if _NAME in kwargs:
        return args, {**kwargs, _NAME: mask}
    position = _position(module, args, _NAME)
    return (args if position is None else (*args[:position], mask, *args[position + 1 :])), kwargs


def full_mask(mask: Any, causal: bool) -> Tensor | None:
    """The mask of a batch without padding, in the form that was given: None, [B, T], or [B, 1, T, T]."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        raise ValueError(
            "this attention implementation's mask cannot be rewritten to hide lengths: load the model with "
            "attn_implementation='sdpa', or pass lengths='public'"
        )
    if mask.dim() == 2:
        return torch.ones_like(mask)
    if not causal:
        # Without a mask every position attends to all.
        return None
    allowed = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return allowed[None, None]
    hidden = torch.zeros(mask.shape[-2:], dtype=mask.dtype, device=mask.device)
    return hidden.masked_fill(~allowed, torch.finfo(mask.dtype).min)[None, None]
