// A factor of a use as the kernels see it: a strided matrix of tokens in one of three element types, read as float32.
#pragma once
#include <cstdint>
#include <cstring>
#include <tuple>
#include <vector>

namespace fastdp {

enum class Element { f32 = 0, bf16 = 1, f16 = 2 };

struct Factor {
    const void *data;
    Element element;
    int64_t width;       // columns
    int64_t row_stride;  // in elements
    int64_t column_stride;

    // Whether a row can be read in place as consecutive floats.
    bool plain() const { return element == Element::f32 && column_stride == 1; }

    const float *row(int64_t t) const { return static_cast<const float *>(data) + t * row_stride; }

    float entry(int64_t t, int64_t column) const;
};

// What Python passes: address, element type, width, row stride, column stride.
using FactorTuple = std::tuple<uintptr_t, int, int64_t, int64_t, int64_t>;

inline Factor factor_of(const FactorTuple &t) {
    return {reinterpret_cast<const void *>(std::get<0>(t)), static_cast<Element>(std::get<1>(t)), std::get<2>(t),
            std::get<3>(t), std::get<4>(t)};
}

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 0x1fu;
    uint32_t fraction = half & 0x3ffu;
    uint32_t bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | (fraction << 13);
    } else if (exponent != 0) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else if (fraction != 0) {
        int shift = 0;
        while (!(fraction & 0x400u)) fraction <<= 1, ++shift;
        bits = sign | uint32_t(113 - shift) << 23 | ((fraction & 0x3ffu) << 13);
    } else {
        bits = sign;
    }
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float bfloat_to_float(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float Factor::entry(int64_t t, int64_t column) const {
    const int64_t index = t * row_stride + column * column_stride;
    if (element == Element::f32) return static_cast<const float *>(data)[index];
    const uint16_t half = static_cast<const uint16_t *>(data)[index];
    return element == Element::bf16 ? bfloat_to_float(half) : half_to_float(half);
}

// Columns [start, start + count) of token t as floats.
void read_row(const Factor &factor, int64_t t, int64_t start, int64_t count, float *out);

// The tokens that add to a unit's gradient, in their order: unit u has at[bounds[u]] .. at[bounds[u + 1] - 1].
struct Tokens {
    std::vector<int64_t> at, bounds;

    int64_t count() const { return bounds.back(); }
    int64_t units() const { return static_cast<int64_t>(bounds.size()) - 1; }
    // How many each unit has.
    void write_counts(double *counts) const {
        for (int64_t unit = 0; unit < units(); ++unit) counts[unit] = static_cast<double>(bounds[unit + 1] - bounds[unit]);
    }
    // Whether tokens [first, last) of the list follow each other in memory.
    bool adjacent(int64_t first, int64_t last) const { return last == first || at[last - 1] - at[first] == last - 1 - first; }
};

// Tokens [bounds[0], bounds[1]) and so on without those at which R or every one of the lefts is zero, as padding is: what a
// unit's norm is computed from does not depend on how many of them stand around it. A token whose other factor is not finite
// stays. Without lefts (ids) R alone decides.
Tokens nonzero_tokens(const std::vector<Factor> &lefts, const Factor &right, const std::vector<int64_t> &bounds);

}  // namespace fastdp
