// Noise with AVX-512 (F, DQ, BW, VL): sixteen blocks at once, with the processor's own rotation.
#include "noise.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma,f16c")
// GCC's own AVX-512 header passes a deliberately undefined register to each masked builtin, and then warns of it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace fastdp {
namespace avx512 {
namespace {

constexpr int LANES = 16;
typedef uint32_t vu __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef float vf __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef double vd __attribute__((vector_size(64)));

template <int n>
inline vu rotl(vu x) { return (vu)_mm512_rol_epi32((__m512i)x, n); }
inline vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline vf sqrt(vf x) { return (vf)_mm512_sqrt_ps((__m512)x); }
inline bool any_zero(vi x) { return _mm512_testn_epi32_mask((__m512i)x, (__m512i)x) != 0; }
inline vf from_half(vh x) { return (vf)_mm512_cvtph_ps((__m256i)x); }
inline vh to_half(vf x) { return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline void halves(vf x, vd &low, vd &high) {
    low = (vd)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)x));
    high = (vd)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)x, 1));
}

// 4 x 4 blocks inside each 128-bit quarter first, then the quarters among themselves.
inline void transpose(const vf w[16], float *out) {
    __m512 q[16];
    for (int k = 0; k < 16; k += 4) {
        const __m512 a = _mm512_unpacklo_ps((__m512)w[k], (__m512)w[k + 1]);
        const __m512 b = _mm512_unpackhi_ps((__m512)w[k], (__m512)w[k + 1]);
        const __m512 c = _mm512_unpacklo_ps((__m512)w[k + 2], (__m512)w[k + 3]);
        const __m512 d = _mm512_unpackhi_ps((__m512)w[k + 2], (__m512)w[k + 3]);
        q[k] = _mm512_shuffle_ps(a, c, 0x44);
        q[k + 1] = _mm512_shuffle_ps(a, c, 0xee);
        q[k + 2] = _mm512_shuffle_ps(b, d, 0x44);
        q[k + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        const __m512 a = _mm512_shuffle_f32x4(q[j], q[4 + j], 0x88);
        const __m512 b = _mm512_shuffle_f32x4(q[j], q[4 + j], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(q[8 + j], q[12 + j], 0x88);
        const __m512 d = _mm512_shuffle_f32x4(q[8 + j], q[12 + j], 0xdd);
        _mm512_storeu_ps(out + 16 * j, _mm512_shuffle_f32x4(a, c, 0x88));
        _mm512_storeu_ps(out + 16 * (4 + j), _mm512_shuffle_f32x4(b, d, 0x88));
        _mm512_storeu_ps(out + 16 * (8 + j), _mm512_shuffle_f32x4(a, c, 0xdd));
        _mm512_storeu_ps(out + 16 * (12 + j), _mm512_shuffle_f32x4(b, d, 0xdd));
    }
}

#include "noise_lanes.inc"

}  // namespace

const NoiseLanes noise_lanes = {words, normals, normals_ahead, to_grid,    scale_add,
                                adamw, dot,     to_float,      from_float, pull_back};

}  // namespace avx512
}  // namespace fastdp

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif
