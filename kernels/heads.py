"""Cross-entropy and its gradient, in place of the logits. A program has one token: it reads the logits twice, writes once."""

import torch
import triton
import triton.language as tl

from .launch import assert_ids, next_power_of_2, on_device_of, serves

HEAD_COLUMNS = 4096


@triton.jit
def _load_logits(p_row, o_v, words, width):
    # Columns from `words` to `width` are padding. Masking by the width, a multiple of 16, keeps loads wide.
    # [b]
    z = tl.load(p_row + o_v, mask=o_v < width, other=0.0).to(tl.float32)
    return tl.where(o_v < words, z, float("-inf"))


@triton.jit(do_not_specialize=["words", "ignored"])
def gradient_kernel(p_logits, p_target, p_weights, p_losses, words, width, ignored, b: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(p_target + row)
    weight = tl.load(p_weights + row).to(tl.float32)
    labelled = target != ignored
    p_row = p_logits + row * width
    # Read before the second loop, in which another warp may overwrite it.
    own = tl.load(p_row + target, mask=labelled, other=0.0).to(tl.float32)
    o_v = tl.arange(0, b)
    most = tl.full((b,), float("-inf"), tl.float32)
    total = tl.zeros((b,), tl.float32)
    for first in range(0, words, b):
        z = _load_logits(p_row, first + o_v, words, width)
        higher = tl.maximum(most, z)
        # Without this, a column that has only seen -inf would give -inf - -inf = NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - base) + tl.exp(z - base)
        most = higher
    top = tl.max(most, 0)
    whole = tl.sum(total * tl.exp(most - top), 0)
    tl.store(p_losses + row, tl.where(labelled, tl.log(whole) + top - own, 0.0))
    share = weight / whole
    kept = labelled & (weight != 0.0)
    for first in range(0, width, b):
        z = _load_logits(p_row, first + o_v, words, width)
        gradient = tl.exp(z - top) * share - tl.where(first + o_v == target, weight, 0.0)
        # [b]
        gradient = tl.where(kept & (first + o_v < words), gradient, 0.0)
        tl.store(p_row + first + o_v, gradient.to(p_logits.dtype.element_ty), mask=first + o_v < width)


@serves(1)
def cross_entropy_gradient_(
    logits: torch.Tensor, target: torch.Tensor, weights: torch.Tensor, ignored: int, words: int
) -> torch.Tensor:
    """Overwrite logits [N, V] by the gradient of their weighted losses; return the losses, float32 [N].

    Args:
        target: int64 [N]; a token whose target is ``ignored`` has loss and gradient 0.
        weights: [N], factor of each token's gradient.
        words: size of the vocabulary; columns from there on are padding.
    """
    tokens, width = logits.shape
    losses = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    if logits.numel() == 0:
        return losses.zero_()
    assert_ids(target.masked_fill(target == ignored, 0), words)
    with on_device_of(logits):
        gradient_kernel[(tokens,)](
            logits, target.contiguous(), weights.contiguous(), losses, words, width, ignored,
            b=min(HEAD_COLUMNS, max(16, next_power_of_2(width))), enable_fp_fusion=True, num_warps=8,
        )  # fmt: skip
    return losses
