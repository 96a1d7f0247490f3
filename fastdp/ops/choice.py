"""The exponential mechanism over a whole vocabulary: ``exponential_choice``, and its law, ``choice_log_probabilities``."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

import fastdp._native as _native
from fastdp.ops.dchi import as_float64, check_per_token, check_token_ids, uniforms
from fastdp.ops.noise import check_position
from fastdp.ops.snap import centre_of, refuse_non_finite, survey
from fastdp.ops.stream import Draw, NoiseStream, chacha_words, native_threads
from fastdp.ops.table import Op, check_tensors

#: Blocks of a position that belong to one token.
_BLOCKS = 64
#: Products of eight-bit entries of a row this wide still add up in 32 bits.
_WIDEST = 1 << 16


def _check_choice(
    ids: Tensor,
    table: Tensor,
    scale: Tensor,
    position: Tensor | NoiseStream | Draw,
    cap: float | None,
    log_prior: Tensor | None,
) -> None:
    check_token_ids(ids, table)
    check_position(position)
    check_per_token("scale", scale, ids, positive=False)
    if cap is not None and not 0.0 < cap < math.inf:
        raise ValueError(f"cap must be finite and above 0, got {cap}")
    if log_prior is not None and (log_prior.shape != table.shape[:1] or log_prior.dtype != torch.float64):
        raise ValueError(
            f"log_prior is {log_prior.dtype} {list(log_prior.shape)}: "
            f"it must have one number for each of the table's {table.shape[0]} rows"
        )
    if log_prior is not None and not (bool((log_prior < math.inf).all()) and bool(torch.isfinite(log_prior).any())):
        raise ValueError("log_prior must hold numbers or -inf, at least one of them a number")
    if ids.numel() > (1 << 32) // _BLOCKS:
        raise ValueError(f"{ids.numel()} tokens are more than one position has draws for: at most 2^26")
    if table.shape[1] > _WIDEST:
        raise ValueError(f"the table's rows have {table.shape[1]} entries: at most {_WIDEST}")


def _log_weights(token: int, wide: Tensor, scale: float, cap: float | None, log_prior: Tensor | None) -> Tensor:
    distance = (wide - wide[token]).square().sum(1).sqrt()
    if cap is not None:
        distance = distance.clamp(max=cap)
    weight = -scale * distance
    return weight if log_prior is None else weight + log_prior


def _choice_reference(
    ids: Tensor, table: Tensor, scale: Tensor, position: Tensor, cap: float | None, log_prior: Tensor | None
) -> Tensor:
    refuse_non_finite("table", table)
    wide = table.double().contiguous()
    words = chacha_words(position, 0, _BLOCKS * ids.numel())[::_BLOCKS, :2]
    draws = torch.from_numpy(uniforms(words)[:, 0]).to(table.device)
    result = torch.empty_like(ids).view(-1) if ids.is_contiguous() else ids.new_empty(ids.numel())
    flat, scales = ids.reshape(-1), scale.expand(ids.shape).reshape(-1)
    laws, law = torch.stack([flat.double(), scales]).unique(dim=1, return_inverse=True)
    for k in range(laws.shape[1]):
        token, strength = int(laws[0, k]), float(laws[1, k])
        logs = _log_weights(token, wide, strength, cap, log_prior)
        if not math.isfinite(float(logs.max())):
            raise ValueError(f"no row has a weight for id {token}: its scale times every distance is beyond float64")
        weights = logs.softmax(0)
        ends = weights.cumsum(0)
        mine = law == k
        at = torch.searchsorted(ends, draws[mine] * ends[-1], right=True)
        result[mine] = at.clamp(max=int(weights.nonzero()[-1]))
    return result.view(ids.shape)


EXPONENTIAL_CHOICE = Op(
    "exponential_choice(Tensor ids, Tensor table, Tensor scale, Tensor position, float? cap, Tensor? log_prior) -> Tensor",
    reference=_choice_reference,
    fake=lambda ids, *_: torch.empty_like(ids, memory_format=torch.contiguous_format),
    check=_check_choice,
)


EXPONENTIAL_CHOICE.in_family("choice")


def _rows_as_double(value: Tensor | None, table: Tensor) -> Tensor | None:
    return None if value is None else value.detach().to(device=table.device, dtype=torch.float64)


@torch.no_grad()
def choice_log_probabilities(
    token: int, table: Tensor, scale: float, cap: float | None = None, log_prior: Tensor | None = None
) -> Tensor:
    """The law that `exponential_choice` draws from for one token: log probabilities, float64 [V].

    For exact checks of privacy bounds on small tables.
    """
    wide, prior = table.double().contiguous(), _rows_as_double(log_prior, table)
    return _log_weights(token, wide, scale, cap, prior).log_softmax(0)


def exponential_choice(
    ids: Tensor,
    table: Tensor,
    scale: float | Tensor,
    stream: NoiseStream | Draw,
    cap: float | None = None,
    *,
    log_prior: Tensor | None = None,
) -> Tensor:
    """Draw a row for each token by the exponential mechanism over the whole table (McSherry and Talwar, FOCS 2007).

    Token i becomes w with probability proportional to ``pi_w exp(-scale_i min(dist(i, w), cap))``, dist being the
    Euclidean distance of their rows. With one scale for all: ``scale = eta / 2`` gives ``eta * distance`` metric privacy,
    with or without a prior; ``scale = epsilon / (2 R)`` and ``cap = R`` give epsilon-local DP. **A scale that depends on the
    token itself voids these.**

    The definition is the inverse of the distribution function in float64, at a 64-bit uniform of the token's own. On a
    CPU the same law is drawn by rejection: an eight-bit bound of every distance proposes, the float64 distance decides
    (``csrc/choice.cpp``), so the two agree in law and not draw by draw. Distances are computed once for each distinct
    id; processors with matrix tiles (AMX) multiply in them. A token's randomness depends on the stream and its place among
    the flattened ids alone, not on threads, grouping or the other tokens. A uniform has 53 bits, so that probabilities
    are right to about 2^-50 in all: no epsilon here counts that delta. Scratch: V d bytes, and at most 512 V bytes of
    bounds; nothing of size N V.

    Args:
        ids: int64, any shape, rows of the table; where they are elsewhere, they and the answer are moved.
        table: [V, d], float32 (16-bit tables are widened), d <= 65,536; must not itself depend on private data.
        scale: in units of 1 / distance, at least 0: a number, or a tensor of the shape of ``ids``.
        stream: a ``NoiseStream`` or one position of it.
        cap: distances above it count as it; None for no cap.
        log_prior: [V], log pi_w up to a constant, -inf for rows never to be drawn; public.

    Returns:
        int64, of the shape of ``ids``.

    Raises:
        IndexError: an id outside the table.
        ValueError: a number out of range or NaN; wrong shapes or devices; a NaN or infinity in the table; an id for which no
            row has a weight above 0, even in float64.
        TypeError: wrong dtypes, or no stream.
        RuntimeError: the position was drawn before.

    >>> table = torch.tensor([[0.0], [1.0], [50.0]])
    >>> drawn = exponential_choice(torch.zeros(1000, dtype=torch.int64), table, 1.0, NoiseStream())
    >>> sorted(set(drawn.tolist()))  # the third is e^50 times less likely
    [0, 1]
    """
    check_tensors(ids=ids, table=table)
    prior = _rows_as_double(log_prior, table)
    there, limit = ids.to(table.device), None if cap is None else float(cap)
    return EXPONENTIAL_CHOICE(there, table, as_float64(scale, there), stream, limit, prior).to(ids.device)


# On processors: csrc/choice.cpp, handed the tokens in the order of their laws.


@EXPONENTIAL_CHOICE.on_cpu
def _exponential_choice_on_cpu(
    ids: Tensor, table: Tensor, scale: Tensor, position: Tensor, cap: float | None, log_prior: Tensor | None
) -> Tensor:
    table = table.detach().float().contiguous()
    bits = survey("table", table)
    result = torch.empty(ids.shape, dtype=torch.int64)
    if not ids.numel():
        return result
    flat = ids.reshape(-1).numpy()
    scales = np.broadcast_to(scale.double().numpy(), ids.shape).reshape(-1) if scale.dim() else np.full(1, float(scale))
    # Keys of sixteen bits are sorted by their digits, ten times faster than by comparison.
    keys = flat.astype(np.uint16) if table.shape[0] <= 1 << 16 else flat
    order = np.lexsort((scales, flat)) if scale.dim() else np.argsort(keys, kind="stable")
    sorted_ids = flat[order]
    sorted_scales = scales[order] if scale.dim() else np.broadcast_to(scales, len(order))
    new = np.ones(len(order) + 1, bool)
    new[1:-1] = (sorted_ids[1:] != sorted_ids[:-1]) | (sorted_scales[1:] != sorted_scales[:-1])
    starts = np.flatnonzero(new)
    law_ids, law_scales = sorted_ids[starts[:-1]], sorted_scales[starts[:-1]].copy()
    _native.exponential_choice(
        table=table,
        rows=table.shape[0],
        d=table.shape[1],
        centre=centre_of(table),
        table_bits=bits,
        order=order,
        starts=starts,
        laws=len(law_ids),
        law_ids=law_ids,
        law_scales=law_scales,
        log_prior=None if log_prior is None else log_prior.contiguous(),
        cap=math.inf if cap is None else cap,
        position=position,
        out=result,
        threads=native_threads(),
    )
    return result
