// Box and Muller's formula in float64, and where that leaves a rounding open in pairs of float64. Called for few
// elements: plain code, on any processor.
#include "exact_normal.h"

#include <cmath>

namespace fastdp {
namespace {

// Words of a block and of its continuations: word k of continuation c is digit c, in base 2^32, of uniform k.
struct Digits {
    uint32_t radius[4], angle[4];
};

// The first `count` digits of the pair of uniforms of element `index`. Blocks above 2^31 continue those below.
Digits digits(const Position &at, uint64_t index, int count) {
    const uint32_t block = static_cast<uint32_t>(index / 16);
    const int k = static_cast<int>(index % 8);
    Digits found = {};
    for (int c = 0; c < count; ++c) {
        Position place = at;
        if (c == 1 || c == 2) place.tensor |= kDomainFlag;
        uint32_t words[16];
        chacha_block(place, c < 2 ? block : block | 0x80000000u, words);
        found.radius[c] = words[k];
        found.angle[c] = words[k + 8];
    }
    return found;
}

Pair quick(double a, double b) {
    const double sum = a + b;
    return {sum, b - (sum - a)};
}

Pair sum(double a, double b) {
    const double s = a + b, part = s - a;
    return {s, (a - (s - part)) + (b - part)};
}

Pair operator+(Pair a, Pair b) {
    Pair high = sum(a.hi, b.hi);
    const Pair low = sum(a.lo, b.lo);
    high = quick(high.hi, high.lo + low.hi);
    return quick(high.hi, high.lo + low.lo);
}

Pair operator-(Pair a) { return {-a.hi, -a.lo}; }

Pair operator*(Pair a, Pair b) {
    const double p = a.hi * b.hi;
    return quick(p, std::fma(a.hi, b.hi, -p) + (a.hi * b.lo + a.lo * b.hi));
}

Pair operator/(Pair a, Pair b) {
    const double first = a.hi / b.hi;
    const Pair rest = a + -(Pair{first, 0} * b);
    const double second = rest.hi / b.hi;
    const Pair last = rest + -(Pair{second, 0} * b);
    return quick(first, second) + Pair{last.hi / b.hi, 0};
}

Pair square_root(Pair a) {
    const double root = std::sqrt(a.hi);
    const Pair rest = a + -(Pair{root, 0} * Pair{root, 0});
    return quick(root, rest.hi / (2 * root));
}

Pair one_over(double n) { return Pair{1, 0} / Pair{n, 0}; }

Pair fraction_of(const uint32_t w[4], uint32_t flip) {
    Pair u = {std::ldexp(static_cast<double>(w[0] ^ flip), -32), 0};
    for (int c = 1; c < 4; ++c) u = u + Pair{std::ldexp((w[c] ^ flip) + (c == 3 ? 0.5 : 0.0), -32 * (c + 1)), 0};
    return u;
}

constexpr Pair kLn2 = {0x1.62e42fefa39efp-1, 0x1.abc9e3b39803fp-56};
constexpr Pair kQuarterPi = {0x1.921fb54442d18p-1, 0x1.1a62633145c07p-55};

// sqrt(-2 ln u) with u = m / 2^k: -ln u = k ln 2 - ln(1 - x), x = 1 - m at most 1/2, and -ln(1 - x) = 2 artanh(x / (2
// - x)), 34 terms of its series; no term cancels another, and for u near 1 the distance from 1 is taken exactly.
Pair radius(const uint32_t w[4]) {
    int halvings = 0;
    Pair x;
    if (w[0] >> 31) {
        x = fraction_of(w, 0xffffffffu);
    } else {
        const Pair u = fraction_of(w, 0);
        int exponent;
        std::frexp(u.hi, &exponent);
        halvings = -exponent;
        x = Pair{1, 0} + -Pair{std::ldexp(u.hi, halvings), std::ldexp(u.lo, halvings)};
    }
    const Pair t = x / (Pair{2, 0} + -x), square = t * t;
    Pair series = one_over(69);
    for (int n = 33; n >= 0; --n) series = series * square + one_over(2 * n + 1);
    const Pair log = Pair{static_cast<double>(halvings), 0} * kLn2 + Pair{2, 0} * t * series;
    return square_root(Pair{2, 0} * log);
}

// cos (or sin) of 2 pi times the angle's fraction: its top bits give the quadrant, the rest an angle of at most pi / 4.
Pair turned(const uint32_t w[4], bool sine) {
    const uint32_t shifted = w[0] + 0x20000000u;
    uint32_t rest[4] = {0, w[1], w[2], w[3]};
    Pair s = fraction_of(rest, 0) + Pair{std::ldexp(static_cast<double>(static_cast<int32_t>(w[0] << 2) >> 2), -32), 0};
    const Pair angle = Pair{8 * s.hi, 8 * s.lo} * kQuarterPi, square = angle * angle;
    const uint32_t quadrant = (shifted >> 30) + (sine ? 3u : 0u);  // sin a = cos(a - pi / 2)
    const bool odd = quadrant & 1u;
    Pair series = {1, 0};
    for (int n = 14; n >= 1; --n)
        series = Pair{1, 0} + -(series * square / Pair{static_cast<double>((2 * n - (odd ? 0 : 1)) * (2 * n + (odd ? 1 : 0))), 0});
    if (odd) series = series * angle;
    // cos of angle + quadrant * pi / 2: cos, -sin, -cos, sin
    const uint32_t sign = (quadrant + 1) & 2u;
    return sign ? -series : series;
}

bool settled(double y, double nearest) { return std::fabs(y - nearest) < 0.5 - 0x1p-36; }

}  // namespace

Pair exact_normal(const Position &at, uint64_t index) {
    const Digits d = digits(at, index, 4);
    return radius(d.radius) * turned(d.angle, index % 16 >= 8);
}

double exact_steps(const Position &at, uint64_t index, float fraction, double ratio) {
    const Digits d = digits(at, index, 2);
    const uint32_t top = d.radius[0];
    // In float64 from 64 bits: an error below 2^-40 steps, unless u is so near to 0 or 1 that more bits of it are needed.
    if (top >> 16 != 0 && top >> 16 != 0xffffu) {
        const double low = d.radius[1] + 0.5;
        const double log = top >> 31 ? std::log1p(-std::ldexp(std::ldexp(~top, 32) + ~d.radius[1] + 0.5, -64))
                                     : std::log(std::ldexp(std::ldexp(top, 32) + low, -64));
        const double angle = std::ldexp(std::ldexp(static_cast<int32_t>(d.angle[0]), 32) + d.angle[1] + 0.5, -64);
        const double around = 2 * 3.14159265358979323846 * angle;
        const double y = fraction + ratio * std::sqrt(-2 * log) * (index % 16 >= 8 ? std::sin(around) : std::cos(around));
        const double nearest = std::nearbyint(y);
        if (settled(y, nearest)) return nearest;
    }
    const Pair y = Pair{fraction, 0} + Pair{ratio, 0} * exact_normal(at, index);
    const double nearest = std::nearbyint(y.hi), beyond = (y.hi - nearest) + y.lo;
    return nearest + (beyond > 0.5) - (beyond < -0.5);
}

}  // namespace fastdp
