"""The cheapest exact route to a use's norms, from a cost model with constants measured on the device.

Three routes give the same per-unit squared norms. ``gram`` multiplies Gram matrices of the two factors; ``direct``
computes each gradient tile by tile and squares it; both leave the factors for the weighted sum, one more product.
``instantiate`` keeps the per-unit gradients, so the weighted sum only reads them back; it is allowed where they are
smaller than the factors.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from typing import Any

import torch

ROUTES = ("gram", "direct", "instantiate")
#: The narrower side of matrices that are summed many in one call, at most: wider ones keep a GPU or a processor busy alone.
NARROW = 64

# Squaring and adding up an entry of a gradient takes the direct kernel as long as multiplying this many tokens into it.
ENTRY_TOKENS = 3
# The Gram kernel computes blocks of this many tokens a side, and whole blocks on the diagonal.
GRAM_BLOCK = 4


@dataclasses.dataclass(frozen=True)
class RouteConstants:
    """Speeds of one device, all threads of it together."""

    device: str  # what was measured, and how
    gram_flops: float  # a second, in the Gram kernel, counting T (T + 4) (m + n) a unit
    direct_flops: float  # a second, in the direct kernel
    product_flops: float  # a second, in matrix products
    bandwidth: float  # bytes a second, read or written
    call_seconds: float  # of an op that does nothing
    #: Whether Gram norms of many matrices are one call, and weighted sums, and all of narrow ones that are instantiated: then
    #: none costs one of its own.
    grouped: bool = False


#: Defaults by device type and width of an element in bytes; float32 stands in for a width that is not listed.
DEFAULTS: dict[tuple[str, int], RouteConstants] = {
    ("cpu", 4): RouteConstants(
        "one core of an AMD EPYC (Zen 4), AVX-512, by fit; more cores keep the ratios, which are all that choosing needs",
        gram_flops=1.07e11,
        direct_flops=1.12e11,
        product_flops=1.01e11,
        bandwidth=1.4e10,
        call_seconds=1.2e-5,
    ),
    ("cuda", 4): RouteConstants(
        "assumed for an H200, not measured: 60% of the data sheet's rates",
        gram_flops=4.0e13,
        direct_flops=4.0e13,
        product_flops=4.0e13,
        bandwidth=3.8e12,
        call_seconds=1.0e-5,
        grouped=True,
    ),
    ("cuda", 2): RouteConstants(
        "an H100, bfloat16, matrices of a GPT-2 and of a Llama of 1B at 1,024 tokens",
        gram_flops=3.6e14,
        direct_flops=5.0e14,
        product_flops=4.9e14,
        bandwidth=3.0e12,
        call_seconds=2.0e-5,
        grouped=True,
    ),
}


def constants_for(device: torch.device | str, dtype: torch.dtype) -> RouteConstants:
    """The default constants of a device; a device of another kind is taken for a CPU."""
    kind = torch.device(device).type
    return DEFAULTS.get((kind, dtype.itemsize)) or DEFAULTS.get((kind, 4)) or DEFAULTS["cpu", 4]


def is_allowed(
    route: str,
    m: int,
    n: int,
    length: int,
    units: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> bool:
    """Whether a route may be taken: ``instantiate`` only where gradients take half the memory of the larger factor or less.

    The right factor is often shared with other uses, or kept by the model itself, so that letting go of it frees nothing. The
    gradient of a single unit takes the place of the sum, which would be made in any case: it may be nearly as large as both.
    So may those of any units on a GPU, whose matrix products of 16-bit factors are twice as fast as direct norms and sums.
    """
    if route != "instantiate":
        return True
    if units == 1 or (torch.device(device).type != "cpu" and dtype.itemsize == 2):
        return 4 * m * n < length * (m + n) * dtype.itemsize
    return 2 * 4 * m * n <= length * max(m, n) * dtype.itemsize


def _kernel_seconds(
    route: str, m: int, n: int, length: float, tokens: int, units: int, constants: RouteConstants
) -> float:
    if route == "gram":
        padded = GRAM_BLOCK * math.ceil(length / GRAM_BLOCK)
        return units * padded * (padded + GRAM_BLOCK) * (m + n) / constants.gram_flops
    return 2 * (tokens + ENTRY_TOKENS * units) * m * n / constants.direct_flops


def predicted_seconds(
    route: str,
    m: int,
    n: int,
    length: int,
    units: int,
    *,
    keeps_factors: bool = True,
    dtype: torch.dtype = torch.float32,
    constants: RouteConstants | None = None,
    device: torch.device | str = "cpu",
) -> float:
    """Time of the norms of a use of a matrix [m, n] and, if ``keeps_factors``, of the weighted sum that follows.

    Norms alone are wanted in the first of two passes under checkpointing. ``length`` is the number of tokens of a unit; where
    lengths differ, their root mean square.
    """
    if constants is None:
        constants = constants_for(device, dtype)
    tokens, entries, width = units * length, units * m * n, dtype.itemsize
    product = 2 * tokens * m * n / constants.product_flops
    factors = tokens * (m + n) * width / constants.bandwidth
    # The first of two passes takes every use as it comes; otherwise a use of a group has no call of its own.
    together = constants.grouped and keeps_factors
    if route == "instantiate":
        passes = 3 if keeps_factors else 2  # written, read for the norms, read for the sum
        seconds = product + factors + passes * 4 * entries / constants.bandwidth
        calls = 0 if together and min(m, n) <= NARROW else 2 + keeps_factors
        return seconds + constants.call_seconds * calls
    seconds = _kernel_seconds(route, m, n, length, tokens, units, constants) + factors
    # Beside squared norms the direct route asks for another call, which says how far rounding may have moved them.
    calls = 2 if route == "direct" else 1 - together
    if keeps_factors:
        scaled = 3 * 4 * tokens * min(m, n) / constants.bandwidth  # the narrower factor: read, written scaled, read
        seconds += product + scaled
        calls += 1 - together
    return seconds + constants.call_seconds * calls


@functools.lru_cache(maxsize=4096)
def plan_route(
    m: int,
    n: int,
    length: int,
    units: int,
    *,
    keeps_factors: bool = True,
    dtype: torch.dtype = torch.float32,
    constants: RouteConstants | None = None,
    device: torch.device | str = "cpu",
) -> str:
    """The allowed route with the least predicted time; arguments as in `predicted_seconds`."""
    options: Any = {"dtype": dtype, "device": device}
    routes = [route for route in ROUTES if is_allowed(route, m, n, length, units, **options)]
    options |= {"keeps_factors": keeps_factors, "constants": constants}
    return min(routes, key=lambda route: predicted_seconds(route, m, n, length, units, **options))


@functools.lru_cache(maxsize=4096)
def longest_by_gram(m: int, n: int) -> int:
    """Tokens up to which a unit's norms are found by Gram matrices on a processor, and beyond which directly.

    For uses that read the same input m is the sum of their rows. It depends on a unit's own tokens, so that no other unit
    changes how its norm is rounded.
    """
    if min(m, n) <= NARROW:
        return 0
    # The two meet at about 2 m n / (m + n) tokens, which is far fewer than these.
    constants, most = DEFAULTS["cpu", 4], 2 * (m + n)

    def faster(length: int) -> bool:
        gram = _kernel_seconds("gram", m, n, length, length, 1, constants)
        return gram <= _kernel_seconds("direct", m, n, length, length, 1, constants)

    return bisect.bisect_left(range(1, most), True, key=lambda length: not faster(length))
