"""Noised sums rounded to a grid, on the device: the definition is ``fastdp.ops.grid``, the proof docs/noise.md.

Float32 normals decide almost every rounding, in `on_grid`. An element that is left open goes through `settle_element` in a launch
of its own (`settle.py`): 64 bits of its uniforms and float64, and if those leave it open, 128 bits and pairs of float64, 106
bits together. Products are split by masks and not by fused operations, which the interpreter does not have; those the
compiler fuses by itself only lose less.
"""

import triton
import triton.language as tl

from fastdp.ops.grid import grid

from .chacha import DOMAIN_FLAG, own_words

#: Of y = past + ratio z in float32, in ratios, where the radius is at least 2^-12.
ERROR = tl.constexpr(5.394797e-06)
_CONTINUED = tl.constexpr(1 << 31)
_HEAD = tl.constexpr(-(1 << 27))


@triton.jit
def _sum(a, b):
    s = a + b
    part = s - a
    return s, (a - (s - part)) + (b - part)


@triton.jit
def _add(a, a_lo, b, b_lo):
    high, rest = _sum(a, b)
    low, last = _sum(a_lo, b_lo)
    high, rest = _sum(high, rest + low)
    return _sum(high, rest + last)


@triton.jit
def _head(a):
    return (a.to(tl.int64, bitcast=True) & _HEAD).to(tl.float64, bitcast=True)


@triton.jit
def _multiply(a, a_lo, b, b_lo):
    p = a * b
    a1, b1 = _head(a), _head(b)
    a2, b2 = a - a1, b - b1
    error = (((a1 * b1 - p) + a1 * b2) + a2 * b1) + a2 * b2
    return _sum(p, error + (a * b_lo + a_lo * b))


@triton.jit
def _divide(a, a_lo, b, b_lo):
    nothing = a - a
    first = a / b
    p, p_lo = _multiply(first, nothing, b, b_lo)
    rest, rest_lo = _add(a, a_lo, -p, -p_lo)
    second = rest / b
    p, p_lo = _multiply(second, nothing, b, b_lo)
    rest, rest_lo = _add(rest, rest_lo, -p, -p_lo)
    high, low = _sum(first, second)
    return _add(high, low, rest / b, nothing)


@triton.jit
def _flip(word):
    return word ^ 0xFFFFFFFF


@triton.jit
def _fraction(w0, w1, w2, w3):
    # (2^96 w0 + 2^64 w1 + 2^32 w2 + w3 + 1/2) / 2^128, w0 already a float64 and divided
    nothing = w0 - w0
    high, low = _add(w0, nothing, w1.to(tl.float64) * (1.0 / 18446744073709551616.0), nothing)
    third = w2.to(tl.float64) * (1.0 / 4294967296.0) * (1.0 / 18446744073709551616.0)
    high, low = _add(high, low, third, nothing)
    fourth = (w3.to(tl.float64) + 0.5) * (1.0 / 18446744073709551616.0) * (1.0 / 18446744073709551616.0)
    return _add(high, low, fourth, nothing)


@triton.jit
def _exact_radius(w0, w1, w2, w3):
    # sqrt(-2 ln u), u = m / 2^k: -ln u = k ln 2 - ln(1 - x), x = 1 - m at most 1/2, and -ln(1 - x) = 2 artanh(x / (2 -
    # x)); for u near 1 the distance from 1 is taken exactly.
    u, u_lo = _fraction(w0.to(tl.float64) * (1.0 / 4294967296.0), w1, w2, w3)
    away, away_lo = _fraction(_flip(w0).to(tl.float64) * (1.0 / 4294967296.0), _flip(w1), _flip(w2), _flip(w3))
    near = w0 >= _CONTINUED
    exponent = (u.to(tl.int64, bitcast=True) >> 52) - 1022
    halvings = tl.where(near, 0, -exponent)
    power = ((halvings + 1023) << 52).to(tl.float64, bitcast=True)
    nothing = u - u
    x, x_lo = _add(nothing + 1.0, nothing, -u * power, -u_lo * power)
    x = tl.where(near, away, x)
    x_lo = tl.where(near, away_lo, x_lo)
    under, under_lo = _add(nothing + 2.0, nothing, -x, -x_lo)
    t, t_lo = _divide(x, x_lo, under, under_lo)
    square, square_lo = _multiply(t, t_lo, t, t_lo)
    odd = nothing + 69.0
    series, series_lo = _divide(nothing + 1.0, nothing, odd, nothing)
    for _ in range(34):
        odd -= 2.0
        series, series_lo = _multiply(series, series_lo, square, square_lo)
        term, term_lo = _divide(nothing + 1.0, nothing, odd, nothing)
        series, series_lo = _add(series, series_lo, term, term_lo)
    log, log_lo = _multiply(t, t_lo, series, series_lo)
    ln2 = nothing + tl.full((), 0.6931471805599453, tl.float64)
    ln2_lo = nothing + tl.full((), 2.3190468138462996e-17, tl.float64)
    whole, whole_lo = _multiply(halvings.to(tl.float64), nothing, ln2, ln2_lo)
    log, log_lo = _add(2.0 * whole, 2.0 * whole_lo, 4.0 * log, 4.0 * log_lo)
    root = tl.sqrt(log)
    p, p_lo = _multiply(root, nothing, root, nothing)
    rest, _ = _add(log, log_lo, -p, -p_lo)
    return _sum(root, rest / (2.0 * root))


@triton.jit
def _exact_turn(w0, w1, w2, w3):
    # cos and sin of 2 pi times the fraction: its top bits give the quadrant, the rest an angle of at most pi / 4.
    shifted = w0 + 0x20000000
    top = ((w0 << 2).to(tl.int32, bitcast=True) >> 2).to(tl.float64) * (1.0 / 4294967296.0)
    s, s_lo = _fraction(top, w1, w2, w3)
    nothing = s - s
    quarter_pi = nothing + tl.full((), 0.7853981633974483, tl.float64)
    quarter_pi_lo = nothing + tl.full((), 3.061616997868383e-17, tl.float64)
    angle, angle_lo = _multiply(8.0 * s, 8.0 * s_lo, quarter_pi, quarter_pi_lo)
    square, square_lo = _multiply(angle, angle_lo, angle, angle_lo)
    c, c_lo, d, d_lo = nothing + 1.0, nothing, nothing + 1.0, nothing
    n = nothing + 30.0
    for _ in range(14):
        n -= 2.0
        c, c_lo = _multiply(c, c_lo, square, square_lo)
        c, c_lo = _divide(-c, -c_lo, (n - 1.0) * n, nothing)
        c, c_lo = _add(c, c_lo, nothing + 1.0, nothing)
        d, d_lo = _multiply(d, d_lo, square, square_lo)
        d, d_lo = _divide(-d, -d_lo, n * (n + 1.0), nothing)
        d, d_lo = _add(d, d_lo, nothing + 1.0, nothing)
    d, d_lo = _multiply(d, d_lo, angle, angle_lo)
    odd = (shifted & 0x40000000) != 0
    below = tl.where(((shifted + 0x40000000) & 0x80000000) != 0, -1.0, 1.0).to(tl.float64)
    beside = tl.where((shifted & 0x80000000) != 0, -1.0, 1.0).to(tl.float64)
    return (
        tl.where(odd, d, c) * below,
        tl.where(odd, d_lo, c_lo) * below,
        tl.where(odd, c, d) * beside,
        tl.where(odd, c_lo, d_lo) * beside,
    )


@triton.jit
def exact_normal(p_position, block, element):
    """The normals ``element`` (0 .. 15) of ``block`` (uint32), of one shape, from 128 bits of each uniform: two float64 parts."""
    plain = tl.full((), 0, tl.uint32)
    flag = tl.full((), DOMAIN_FLAG, tl.uint32)
    r0, a0 = own_words(p_position, block, element, plain)
    r1, a1 = own_words(p_position, block, element, flag)
    r2, a2 = own_words(p_position, block | _CONTINUED, element, flag)
    r3, a3 = own_words(p_position, block | _CONTINUED, element, plain)
    r, r_lo = _exact_radius(r0, r1, r2, r3)
    c, c_lo, s, s_lo = _exact_turn(a0, a1, a2, a3)
    return _multiply(r, r_lo, tl.where(element < 8, c, s), tl.where(element < 8, c_lo, s_lo))


@triton.jit
def _near_normal(p_position, block, element):
    # From 64 bits in float64, and whether these are too few: u below 2^-16 or above 1 - 2^-16.
    r0, a0 = own_words(p_position, block, element, tl.full((), 0, tl.uint32))
    r1, a1 = own_words(p_position, block, element, tl.full((), DOMAIN_FLAG, tl.uint32))
    u = (r0.to(tl.uint64) << 32) | r1.to(tl.uint64)
    away = (_flip(r0).to(tl.uint64) << 32) | _flip(r1).to(tl.uint64)
    x = (away.to(tl.float64) + 0.5) * (1.0 / 18446744073709551616.0)
    # ln(1 - x) without losing the digits of a small x (Kahan)
    left = 1.0 - x
    close = tl.log(left) * (x / tl.where(left == 1.0, 1.0, 1.0 - left))
    far = tl.log((u.to(tl.float64) + 0.5) * (1.0 / 18446744073709551616.0))
    radius = tl.sqrt(-2.0 * tl.where(r0 >= _CONTINUED, tl.where(left == 1.0, -x, close), far))
    turn = ((a0.to(tl.uint64) << 32) | a1.to(tl.uint64)).to(tl.int64, bitcast=True)
    angle = (turn.to(tl.float64) + 0.5) * tl.full((), 6.283185307179586 / 18446744073709551616.0, tl.float64)
    top = r0 >> 16
    return radius * tl.where(element < 8, tl.cos(angle), tl.sin(angle)), (top == 0) | (top == 0xFFFF)


@triton.jit
def _past_whole(x, inverse):
    # What x in steps of the grid is past a whole number, at most 1/2 in size: adding 2^23 of its sign leaves no place for a
    # fraction. From 2^23 steps on there is none.
    steps = x * inverse
    large = ((steps.to(tl.uint32, bitcast=True) & 0x80000000) | 0x4B000000).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(steps) < 8388608.0, steps - ((steps + large) - large), 0.0)


@triton.jit
def _released(x, past, whole, spacing):
    # Every product and the first sum are exact.
    return tl.fma(-past, spacing, x) + whole * spacing


@triton.jit
def on_grid(x, z, ratio, spacing, inverse):
    """``x + ratio * spacing * z`` rounded to multiples of ``spacing``: x float32 [B, 16], z marked normals; and where it is open.

    ``inverse`` is 1 / spacing. The error of float32 is below 2^-17.5 ratios, but for radii below 2^-12, which 32 bits of
    the uniform leave open by 2^-15: an element whose rounding hangs on that is left open, and its number means nothing.
    """
    past = _past_whole(x, inverse)
    y = tl.fma(z, ratio, past)
    whole = (y + 12582912.0) - 12582912.0  # |y| is below 2^8
    room = tl.where(tl.abs(z) < 1.0 / 4096.0, 0.5 - ratio * (1.0 / 32768.0), 0.5 - ratio * ERROR)
    # A marked normal is NaN, and not within any room.
    return _released(x, past, whole, spacing), (tl.abs(y - whole) < room) == 0


@triton.jit
def settle_element(x, p_position, block, element, ratio, spacing, inverse):
    """As `on_grid`, of element ``element`` of each of ``block`` (uint32), all of one shape: no rounding is left open."""
    past = _past_whole(x, inverse)
    z, rough = _near_normal(p_position, block, element)
    y = past.to(tl.float64) + ratio * z
    whole = tl.floor(y + 0.5)
    rough = rough | (tl.abs(y - whole) > 0.5 - 1.0 / 68719476736.0)
    if tl.max(rough.to(tl.int32), 0) > 0:
        z, z_lo = exact_normal(p_position, block, element)
        nothing = z - z
        y, y_lo = _multiply(z, z_lo, nothing + ratio, nothing)
        y, y_lo = _add(y, y_lo, past.to(tl.float64), nothing)
        exact = tl.floor(y + 0.5)
        beyond = (y - exact) + y_lo
        exact += tl.where(beyond > 0.5, 1.0, 0.0) - tl.where(beyond < -0.5, 1.0, 0.0)
        whole = tl.where(rough, exact, whole)
    return _released(x, past, whole.to(tl.float32), spacing)


def numbers_of_grid(std: float) -> tuple[float, float, float]:
    """What `on_grid` and `settle_element` take: std in units of the grid's spacing, the spacing, and its inverse."""
    spacing, ratio = grid(std)
    return ratio, spacing, 1.0 / spacing
