"""Randomised response among k symbols: the pure-epsilon release of least error for one symbol (Kairouz, Bonawitz, Ramage 2016).

A symbol stays with probability e^epsilon / (e^epsilon + k - 1), and each other one takes its place with 1 / (e^epsilon + k - 1):
whatever the symbols were, no answer is more than e^epsilon times as likely under one as under another, and there is no delta.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fastdp.ops.stream import NoiseStream, chacha_words

#: Above it a symbol changes less than once in 10^13, and a 64-bit draw no longer tells that from never to a billionth.
LARGEST_EPSILON = 30.0
#: Below it the bound would be finer than the choice among 2^31 symbols by a 64-bit word.
SMALLEST_EPSILON = 1e-6
_MOST_SYMBOLS = 1 << 31
#: Relative room above the probability of a change: more than the rounding of its formula and of the choice among k - 1.
_ROOM = 2.0**-30


def check_response(k: int, epsilon: float) -> None:
    """Raise ValueError unless there are two symbols at least, and epsilon lies from `SMALLEST_EPSILON` to `LARGEST_EPSILON`."""
    if isinstance(k, bool) or not isinstance(k, int) or not 2 <= k < _MOST_SYMBOLS:
        raise ValueError(f"randomised response needs a whole number of symbols, two at least, not {k!r}")
    if not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
        raise ValueError(
            f"epsilon of randomised response is {epsilon}: it must lie between {SMALLEST_EPSILON:g} and "
            f"{LARGEST_EPSILON:g}, where nothing is hidden any more"
        )


def keep_probability(k: int, epsilon: float) -> float:
    """e^epsilon / (e^epsilon + k - 1). Raises ValueError as `check_response`."""
    check_response(k, epsilon)
    return 1 / (1 + (k - 1) * math.exp(-epsilon))


def changes_below(k: int, epsilon: float) -> int:
    """A symbol changes if a 64-bit word is below this.

    Rounded up, by more than all other roundings can take away, so that the law of the integers themselves keeps its bound: it
    keeps a symbol less often than `keep_probability`, by a billionth of the share that changes.
    """
    check_response(k, epsilon)
    change = (k - 1) * math.exp(-epsilon) / (1 + (k - 1) * math.exp(-epsilon))
    # For k = 2 and a tiny epsilon the room would pass one half, the fair coin that no bound asks to go beyond.
    fair = ((k - 1) << 64) // k
    return min(math.ceil(math.ldexp(change * (1 + _ROOM), 64)) + 1, fair)


def uniform_fractions(count: int, stream: NoiseStream) -> Tensor:
    """Independent fractions, uniform in [0, 1): float64 [count], the 53 bits of 64 drawn that one holds."""
    return torch.from_numpy((stream.uniform64(count) >> 11).astype("float64") * 2.0**-53)


def randomised_response(symbols: Tensor, k: int, epsilon: float, stream: NoiseStream) -> Tensor:
    """Each symbol's own answer, drawn independently: int64 of any shape with entries in [0, k), to the same."""
    below = changes_below(k, epsilon)
    flat = symbols.detach().reshape(-1).cpu()
    if flat.dtype != torch.int64:
        raise TypeError(f"symbols are {flat.dtype}: they must be int64")
    if not flat.numel():
        return symbols.clone()
    if int(flat.min()) < 0 or int(flat.max()) >= k:
        raise IndexError(f"a symbol lies outside 0 to {k - 1}")
    # Four symbols a block of sixteen words: a word of 64 bits whether to change, another to what.
    blocks = -(-flat.numel() // 4)
    words = chacha_words(stream.take(), 0, blocks).view("<u8").reshape(-1, 2)[: flat.numel()]
    changed = words[:, 0] < np.uint64(min(below, (1 << 64) - 1))
    # The word times k - 1, of which the part above 64 bits counts.
    most, low = np.uint64(k - 1), np.uint64(0xFFFFFFFF)
    high = (words[:, 1] >> np.uint64(32)) * most
    other = (high + (((words[:, 1] & low) * most) >> np.uint64(32))) >> np.uint64(32)
    step = torch.from_numpy(other.astype(np.int64)) + 1
    answers = torch.where(torch.from_numpy(changed), (flat + step) % k, flat)
    return answers.reshape(symbols.shape).to(symbols.device)
