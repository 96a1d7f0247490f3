// What rounding is measured by: the sum over a unit's tokens of |L_t| |R_t| (docs/clipping.md).
#pragma once
#include <cstdint>

#include "factor.h"

namespace fastdp {

constexpr double kPaddingSquare = 0x1p-84;  // an entry's, so that products too small for float32 are covered: (2^-42)^2

// Of a unit's tokens, those with roundings of their own besides; and what a unit that cancels has: see fastdp/ops/bounds.py.
constexpr double kEarly = 256, kCancelling = 128;
// float64 arithmetic on a few thousand numbers, each positive: far below this.
constexpr double kOwnSlack = 1 + 0x1p-30;

// The square of a row's norm, raised by what underflow may have taken from it.
inline double padded(double square, int64_t width) { return square + kPaddingSquare * static_cast<double>(width); }

// out[unit] = sum over its `kept` tokens of the norms of R's rows, times those of L's where L is no vector of ids; counts[unit]
// is how many tokens it has.
void row_products_of(const Factor &left, const Factor &right, const Tokens &kept, bool one_hot, bool square, double *out,
                     double *counts, int threads);

}  // namespace fastdp
