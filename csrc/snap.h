// Loops over the rows of an embedding table, in the form the processor likes best; shared by snap and exponential choice.
#pragma once
#include <cstdint>
#include <cstring>

#include "cpu.h"

// Bodies are written once over 16 lanes of GCC's vector types and inlined into one function per instruction set, so that
// no template of the standard library is ever compiled for a processor that may lack the instructions.
#define FASTDP_BODY static inline __attribute__((always_inline))

namespace fastdp {

typedef float f16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i16 __attribute__((vector_size(64), aligned(4)));
typedef uint8_t b16 __attribute__((vector_size(16), aligned(1)));
typedef uint16_t h16 __attribute__((vector_size(32), aligned(2)));
typedef float f8 __attribute__((vector_size(32), aligned(4)));
typedef double d8 __attribute__((vector_size(64)));

constexpr int kLanes = 16;

// Sixteen floats, or the first n and zeros.
FASTDP_BODY void load_tail(const float *from, int64_t n, f16 &x) {
    x = f16{};
    if (n >= kLanes) std::memcpy(&x, from, sizeof x);
    else std::memcpy(&x, from, n * sizeof(float));
}

// Squared Euclidean distance in float64: every difference and square is of float64 values, summed in one fixed order.
double squared_distance(const float *a, const float *b, int64_t d);

// The largest magnitude of a row, as the bits of a float; at or above kNonFinite the row holds a NaN or an infinity.
constexpr int32_t kNonFinite = 0x7f800000;
int32_t largest_bits(const float *row, int64_t d);

}  // namespace fastdp
