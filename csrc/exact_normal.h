// The real normal behind a position, to as many digits as it takes to round a noised sum to its grid (docs/noise.md).
#pragma once
#include <cstdint>

#include "chacha.h"

namespace fastdp {

// A number as the sum of two float64, the second at most half a unit in the last place of the first: 106 bits.
struct Pair {
    double hi, lo;
};

// The normal of element `index` at a position, from 128-bit uniforms, to a relative 2^-98.
Pair exact_normal(const Position &at, uint64_t index);

// The whole number nearest to fraction + ratio * z, z being the normal of element `index`; |fraction| <= 1/2.
double exact_steps(const Position &at, uint64_t index, float fraction, double ratio);

}  // namespace fastdp
