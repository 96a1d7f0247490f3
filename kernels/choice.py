"""``exponential_choice``: inverse distribution functions in float64, a batch of laws at a time.

The uniforms are Triton's; distances are torch's float64 product of centred rows, which no kernel written here would
beat. Tokens with the same id and scale share a law, so each law is made once; scratch does not grow with their
number.
"""

import torch
import triton
import triton.language as tl

from fastdp.ops.snap import refuse_non_finite

from .chacha import chacha_words
from .launch import cdiv, on_device_of, to_device_of

#: Blocks of a position that belong to one token; its draw is the first two words of the first.
_BLOCKS = tl.constexpr(64)
#: Entries of the [laws, V] float64 matrices of a batch.
_ENTRIES = 1 << 23


@triton.jit(do_not_specialize=["n"])
def uniform_kernel(p_position, p_out, n, b: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * b + tl.arange(0, b)
    words, _ = chacha_words(p_position, (token * _BLOCKS).to(tl.uint32), tl.full((), 0, tl.uint32))
    low, high = tl.split(tl.reshape(words, (b, 4, 2)))
    whole = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
    u = (whole.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2^-64
    first = tl.sum(tl.where(tl.arange(0, 4)[None, :] == 0, u, 0.0), 1)
    # [b]
    tl.store(p_out + token, first, mask=token < n)


def uniforms(position: torch.Tensor, n: int, device: torch.device) -> torch.Tensor:
    """The uniforms of tokens 0 .. n - 1 at ``position``, float64 [n], in (0, 1]."""
    out = torch.empty(n, dtype=torch.float64, device=device)
    if n:
        with on_device_of(out):
            uniform_kernel[(cdiv(n, 128),)](
                to_device_of(position, out), out, n, b=128, enable_fp_fusion=True, num_warps=4
            )
    return out


def _first_above(ends: torch.Tensor, row: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """For each target, the first entry above it in its row of ``ends``, whose rows do not decrease."""
    low = torch.zeros_like(row)
    high = torch.full_like(row, ends.shape[1])
    for _ in range(ends.shape[1].bit_length()):
        middle = (low + high) // 2
        above = ends[row, middle.clamp_max(ends.shape[1] - 1)] > target
        low, high = torch.where(above, low, (middle + 1).minimum(high)), torch.where(above, middle, high)
    return low


@torch.no_grad()
def exponential_choice(
    ids: torch.Tensor,
    table: torch.Tensor,
    scale: torch.Tensor,
    position: torch.Tensor,
    cap: float | None,
    log_prior: torch.Tensor | None,
) -> torch.Tensor:
    """Draws w for token i with probability proportional to ``prior_w exp(-scale_i min(|e_i - e_w|, cap))``.

    ids int64, rows of table [V, d], finite; scale float64, one or one an id; log_prior float64 [V] or None.
    """
    refuse_non_finite("table", table)
    flat, scales = ids.reshape(-1), scale.expand(ids.shape).reshape(-1)
    draws = uniforms(position, flat.numel(), table.device)
    result = torch.empty_like(flat)
    laws, law = torch.stack([flat.double(), scales]).unique(dim=1, return_inverse=True)
    # Rows of a trained table are much shorter about their mean, and so are the terms that cancel in a distance.
    rows = table.double()
    rows = rows - rows.mean(0)
    squares = rows.square().sum(1)
    order = law.argsort(stable=True)
    bounds = torch.searchsorted(law[order], torch.arange(laws.shape[1] + 1, device=law.device)).tolist()
    at_once = max(1, _ENTRIES // table.shape[0])
    for first in range(0, laws.shape[1], at_once):
        last = min(first + at_once, laws.shape[1])
        tokens = laws[0, first:last].long()
        distance = torch.addmm(squares + squares[tokens, None], rows[tokens], rows.T, alpha=-2.0).clamp_min_(0).sqrt_()
        distance[torch.arange(last - first, device=tokens.device), tokens] = 0.0
        if cap is not None:
            distance.clamp_max_(cap)
        weights = distance.mul_(-laws[1, first:last, None])
        if log_prior is not None:
            weights += log_prior
        weights = weights.softmax(1)
        ends = weights.cumsum(1)
        possible = weights.shape[1] - 1 - (weights > 0).flip(1).to(torch.uint8).argmax(1)
        mine = order[bounds[first] : bounds[last]]
        at = law[mine] - first
        result[mine] = torch.minimum(_first_above(ends, at, draws[mine] * ends[at, -1]), possible[at])
    return result.view(ids.shape)
