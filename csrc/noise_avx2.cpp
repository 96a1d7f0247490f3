// Noise with AVX2 and FMA: eight blocks at once. Every processor with AVX2 also converts half precision (F16C).
#include "noise.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif

namespace fastdp {
namespace avx2 {
namespace {

constexpr int LANES = 8;
typedef uint32_t vu __attribute__((vector_size(32)));
typedef int32_t vi __attribute__((vector_size(32)));
typedef float vf __attribute__((vector_size(32)));
typedef uint16_t vh __attribute__((vector_size(16)));
typedef double vd __attribute__((vector_size(32)));

template <int n>
inline vu rotl(vu x) {
    // Whole bytes move in one shuffle; other distances take two shifts and an or.
    const __m128i by16 = _mm_set_epi8(13, 12, 15, 14, 9, 8, 11, 10, 5, 4, 7, 6, 1, 0, 3, 2);
    const __m128i by8 = _mm_set_epi8(14, 13, 12, 15, 10, 9, 8, 11, 6, 5, 4, 7, 2, 1, 0, 3);
    if (n == 16) return (vu)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(by16));
    if (n == 8) return (vu)_mm256_shuffle_epi8((__m256i)x, _mm256_broadcastsi128_si256(by8));
    return (x << n) | (x >> (32 - n));
}
inline vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline vf sqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
inline bool any_zero(vi x) { return _mm256_movemask_epi8(_mm256_cmpeq_epi32((__m256i)x, _mm256_setzero_si256())) != 0; }
inline vf from_half(vh x) { return (vf)_mm256_cvtph_ps((__m128i)x); }
inline vh to_half(vf x) { return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void halves(vf x, vd &low, vd &high) {
    low = (vd)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)x));
    high = (vd)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)x, 1));
}

inline void transpose(const vf w[16], float *out) {
    for (int half = 0; half < 16; half += 8) {
        __m256 q[8];
        for (int k = 0; k < 8; k += 4) {
            const vf *v = w + half + k;
            const __m256 a = _mm256_unpacklo_ps((__m256)v[0], (__m256)v[1]);
            const __m256 b = _mm256_unpackhi_ps((__m256)v[0], (__m256)v[1]);
            const __m256 c = _mm256_unpacklo_ps((__m256)v[2], (__m256)v[3]);
            const __m256 d = _mm256_unpackhi_ps((__m256)v[2], (__m256)v[3]);
            q[k] = _mm256_shuffle_ps(a, c, 0x44);
            q[k + 1] = _mm256_shuffle_ps(a, c, 0xee);
            q[k + 2] = _mm256_shuffle_ps(b, d, 0x44);
            q[k + 3] = _mm256_shuffle_ps(b, d, 0xee);
        }
        for (int j = 0; j < 4; ++j) {
            _mm256_storeu_ps(out + 16 * j + half, _mm256_permute2f128_ps(q[j], q[4 + j], 0x20));
            _mm256_storeu_ps(out + 16 * (4 + j) + half, _mm256_permute2f128_ps(q[j], q[4 + j], 0x31));
        }
    }
}

#include "noise_lanes.inc"

}  // namespace

const NoiseLanes noise_lanes = {words, normals, normals_ahead, to_grid,    scale_add,
                                adamw, dot,     to_float,      from_float, pull_back};

}  // namespace avx2
}  // namespace fastdp

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
