// Noise in plain C++ with the compiler's own vectors of four: any processor. A fused multiply-add would be a library
// call on the oldest x86-64, so products and sums are rounded apart here; the normals differ from the other paths by
// that rounding.
#include <cmath>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "factor.h"
#include "noise.h"

namespace fastdp {
namespace portable {
namespace {

constexpr int LANES = 4;
typedef uint32_t vu __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef float vf __attribute__((vector_size(16)));
typedef uint16_t vh __attribute__((vector_size(8)));
typedef double vd __attribute__((vector_size(16)));

template <int n>
inline vu rotl(vu x) { return (x << n) | (x >> (32 - n)); }
inline vf fma(vf a, vf b, vf c) { return a * b + c; }
inline vf sqrt(vf x) {
#if defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)x);
#endif
    for (int l = 0; l < LANES; ++l) x[l] = std::sqrt(x[l]);
    return x;
}
inline bool any_zero(vi x) { return x[0] == 0 || x[1] == 0 || x[2] == 0 || x[3] == 0; }

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline vf from_half(vh x) {
    vf out;
    for (int l = 0; l < LANES; ++l) out[l] = half_to_float(x[l]);
    return out;
}

inline vh to_half(vf x) {
    vh out;
    for (int l = 0; l < LANES; ++l) {
        uint32_t bits;
        const float value = x[l];
        __builtin_memcpy(&bits, &value, 4);
        const uint32_t sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
        uint32_t half;
        if (rest > 0x7f800000u) half = 0x7e00u | (rest >> 13 & 0x3ffu);
        else if (rest >= 0x477ff000u) half = 0x7c00u;  // rounds past 65504
        else if (rest >= 0x38800000u) half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
        else half = static_cast<uint32_t>(std::nearbyint(float_of(rest) * 0x1p24f));  // subnormal: units of 2^-24
        out[l] = static_cast<uint16_t>(sign | half);
    }
    return out;
}

inline void halves(vf x, vd &low, vd &high) {
    low = vd{x[0], x[1]};
    high = vd{x[2], x[3]};
}

inline void transpose(const vf w[16], float *out) {
    for (int l = 0; l < LANES; ++l)
        for (int k = 0; k < 16; ++k) out[16 * l + k] = w[k][l];
}

#include "noise_lanes.inc"

}  // namespace

const NoiseLanes noise_lanes = {words, normals, normals_ahead, to_grid,    scale_add,
                                adamw, dot,     to_float,      from_float, pull_back};

}  // namespace portable
}  // namespace fastdp
