"""Standard normals from ChaCha by position, on the device: the layout that every noise kernel shares.

A position is twelve 32-bit words: key (8), tensor id (31 bits, the top bit is the domain flag), step low, step high, and the
number of double rounds.
The state of block b is that of RFC 8439, section 2.3: constants, key, b, tensor id, step. Its sixteen words ``w``
give the normals of elements ``16 b .. 16 b + 15``: word k (k < 8) the radius and word k + 8 the angle of the elements
k and k + 8.

Positions are read from memory, never passed as numbers: Triton would compile a kernel for some values of a number. So is how
long the loop over rounds is. Positions of one launch have one number of rounds (`fastdp.ops.stream.check_positions`).
"""

import triton
import triton.language as tl

from fastdp.ops.stream import POSITION_WORDS

DOMAIN_FLAG = tl.constexpr(1 << 31)
#: Words of a position (`fastdp.ops.stream`).
POSITION = tl.constexpr(POSITION_WORDS)
#: Blocks a program of the noise kernels makes, on 4 warps: one a thread.
BLOCKS = 128


@triton.jit
def _quarter(a, b, c, d, one):
    # Additions are written as products with a 1 that the compiler does not know: integer products run beside the pipe that
    # does the rest (two thirds) of a round, which is what noise waits for.
    a = a * one + b
    d ^= a
    d = (d << 16) | (d >> 16)
    c = c * one + d
    b ^= c
    b = (b << 12) | (b >> 20)
    a = a * one + b
    d ^= a
    d = (d << 8) | (d >> 24)
    c = c * one + d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _interleave8(a, b, c, d, e, f, g, h):
    # Eight vectors [B] to one tile [B, 8]: joining puts the newest bit of the index last, so the widest stride goes
    # first.
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(even, odd), (a.shape[0], 8))


@triton.jit
def chacha_block(p_position, double_rounds, block, flag):
    """The sixteen words of each of ``block`` (uint32, any shape), of that shape each; ``flag`` is 0 or DOMAIN_FLAG.

    ``double_rounds``: the last word of the position, or of all positions.
    """
    nothing = block ^ block
    # A load of at least one element a thread is what Triton takes layouts from: with the key as vectors, the sixteen
    # words of a block stay in one thread through the joins. As scalars, each join went through shared memory (49
    # barriers).
    p_key = p_position + nothing.to(tl.int32)
    k0 = tl.load(p_key + 0).to(tl.uint32, bitcast=True)
    k1 = tl.load(p_key + 1).to(tl.uint32, bitcast=True)
    k2 = tl.load(p_key + 2).to(tl.uint32, bitcast=True)
    k3 = tl.load(p_key + 3).to(tl.uint32, bitcast=True)
    k4 = tl.load(p_key + 4).to(tl.uint32, bitcast=True)
    k5 = tl.load(p_key + 5).to(tl.uint32, bitcast=True)
    k6 = tl.load(p_key + 6).to(tl.uint32, bitcast=True)
    k7 = tl.load(p_key + 7).to(tl.uint32, bitcast=True)
    tensor = tl.load(p_key + 8).to(tl.uint32, bitcast=True) | flag
    low = tl.load(p_key + 9).to(tl.uint32, bitcast=True)
    high = tl.load(p_key + 10).to(tl.uint32, bitcast=True)
    c0 = nothing + 0x61707865
    c1 = nothing + 0x3320646E
    c2 = nothing + 0x79622D32
    c3 = nothing + 0x6B206574
    x0, x1, x2, x3 = c0, c1, c2, c3
    x4, x5, x6, x7 = k0, k1, k2, k3
    x8, x9, x10, x11 = k4, k5, k6, k7
    x12, x13, x14, x15 = block, tensor, low, high
    one = tl.num_programs(2).to(tl.uint32)  # of a grid that has one dimension
    for _ in range(double_rounds):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12, one)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13, one)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14, one)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15, one)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15, one)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12, one)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13, one)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14, one)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + block, x13 + tensor, x14 + low, x15 + high,
    )  # fmt: skip


@triton.jit
def chacha_words(p_position, block, flag):
    """The words 0..7 and 8..15 of blocks ``block`` (uint32 [B]), two uint32 tiles [B, 8]; ``flag`` is 0 or DOMAIN_FLAG.

    B should be at least the number of threads.
    """
    double_rounds = tl.load(p_position + 11)
    # Or the compiler keeps the state for a loop of no passes, and `adamw` has too few registers.
    tl.assume(double_rounds > 0)
    w = chacha_block(p_position, double_rounds, block, flag)
    first = _interleave8(w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
    return first, _interleave8(w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15])


@triton.jit
def own_words(p_position, block, element, flag):
    """Of element ``element`` (0 .. 15) of ``block``, any shape: the word of its radius and that of its angle."""
    double_rounds = tl.load(p_position + 11)
    if p_position.type.is_block():
        double_rounds = tl.max(double_rounds, 0)  # all are the same
    w = chacha_block(p_position, double_rounds, block, flag)
    pair = element & 7
    radius, angle = w[0], w[8]
    for i in tl.static_range(1, 8):
        radius = tl.where(pair == i, w[i], radius)
        angle = tl.where(pair == i, w[8 + i], angle)
    return radius, angle


@triton.jit
def _minus_two_log1p(x):
    # -2 ln(1 + x) on [-1/2, 0], minimax to 2.4e-8 relative; the hardware's logarithm loses all digits near 1.
    p = tl.fma(x, -2.828462600708008, -3.2778687477111816)
    p = tl.fma(p, x, -2.4163177013397217)
    p = tl.fma(p, x, -0.3614104688167572)
    p = tl.fma(p, x, -0.5272586941719055)
    p = tl.fma(p, x, 0.48738211393356323)
    p = tl.fma(p, x, -0.6672630906105042)
    p = tl.fma(p, x, 0.9999904632568359)
    p = tl.fma(p, x, -2.0)
    return x * p


@triton.jit
def _minus_two_log(f, power):
    # -2 ln(f / 2^power) for f <= 2^(power - 1): f = m 2^e with m in [1/2, 1); no term cancels another.
    bits = f.to(tl.uint32, bitcast=True)
    m = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    halvings = (power + 126 - (bits >> 23).to(tl.int32)).to(tl.float32)
    return tl.fma(halvings, 1.3862943611198906, _minus_two_log1p(m - 1.0))


@triton.jit
def radius_squared(word):
    # -2 ln((word + 1/2) / 2^32). Above 1/2 the distance from 1 is the signed word, exact where it matters.
    signed = word.to(tl.int32, bitcast=True)
    f = signed.to(tl.float32) + 0.5
    near_one = _minus_two_log1p(tl.where(signed < 0, f, -1.0) * (1.0 / 4294967296.0))
    return tl.where(signed < 0, near_one, _minus_two_log(tl.where(signed < 0, 1.0, f), 32))


@triton.jit
def wide_radius_squared(word, second):
    # -2 ln((2^32 word + second + 1/2) / 2^64)
    f = ((word.to(tl.uint64) << 32) | second.to(tl.uint64)).to(tl.float32) + 0.5
    return _minus_two_log(f, 64)


@triton.jit
def turn(word):
    # cos and sin of 2 pi (word + 1/2) / 2^32: top bits give the quadrant, rounded to nearest; the rest, exact as a
    # signed integer, is an angle of at most pi / 4, here in units of pi / 4.
    shifted = word + 0x20000000
    t = (((word << 2).to(tl.int32, bitcast=True) >> 2).to(tl.float32) + 0.5) * (1.0 / 536870912.0)
    s = t * t
    a = tl.fma(s, -3.6609148082789034e-05, 0.0024910164065659046)
    a = tl.fma(a, s, -0.08074583113193512)
    a = tl.fma(a, s, 0.7853981852531433) * t
    b = tl.fma(s, 3.494036945994594e-06, -0.0003258686629123986)
    b = tl.fma(b, s, 0.015854284167289734)
    b = tl.fma(b, s, -0.3084251284599304)
    b = tl.fma(b, s, 1.0)
    odd = (shifted & 0x40000000) != 0
    cosine = tl.where(odd, a, b).to(tl.uint32, bitcast=True) ^ ((shifted + 0x40000000) & 0x80000000)
    sine = tl.where(odd, b, a).to(tl.uint32, bitcast=True) ^ (shifted & 0x80000000)
    return cosine.to(tl.float32, bitcast=True), sine.to(tl.float32, bitcast=True)


@triton.jit
def normals(p_position, block, MARKED: tl.constexpr):
    """float32 [B, 16]: the normals of elements ``16 block + (0..15)``; ``block`` is uint32 [B].

    MARKED puts NaN where 64 bits of the uniform do not tell a normal to float32's accuracy, once in 2^32 radii.
    """
    first, last = chacha_words(p_position, block, tl.full((), 0, tl.uint32))
    square = radius_squared(first)
    # Tails beyond 6 sigma: a word below 2^16 is continued by 32 more bits. Few tiles hold one, so few make the second
    # block.
    if tl.min(tl.min(first, 1), 0) < 65536:
        second, _ = chacha_words(p_position, block, tl.full((), DOMAIN_FLAG, tl.uint32))
        square = tl.where(first < 65536, wide_radius_squared(first, second), square)
        if MARKED:
            square = tl.where(first == 0, float("nan"), square)
    radius = tl.sqrt(square)
    cosine, sine = turn(last)
    pairs = tl.join(radius * cosine, radius * sine)  # [B, 8, 2]
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (block.shape[0], 16))
