// What rounding is measured by: the sum over a unit's tokens of |L_t| |R_t| (docs/clipping.md).
#pragma once
#include <cstdint>

namespace fastdp {

constexpr double kPaddingSquare = 0x1p-84;  // an entry's, so that products too small for float32 are covered: (2^-42)^2

// Of a unit's tokens, those with roundings of their own besides; and what a unit that cancels has: see fastdp/ops/bounds.py.
constexpr double kEarly = 256, kCancelling = 128;
// float64 arithmetic on a few thousand numbers, each positive: far below this.
constexpr double kOwnSlack = 1 + 0x1p-30;

// The square of a row's norm, raised by what underflow may have taken from it.
inline double padded(double square, int64_t width) { return square + kPaddingSquare * static_cast<double>(width); }

}  // namespace fastdp
