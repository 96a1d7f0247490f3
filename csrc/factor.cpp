#include "factor.h"

#include "cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdp {
namespace {

#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) int64_t widen_bf16(const uint16_t *in, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i *>(in + i));
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16)));
    }
    return i;
}

__attribute__((target("avx2,f16c"))) int64_t widen_f16(const uint16_t *in, int64_t count, float *out) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(in + i))));
    return i;
}
#endif

// out[i] = in[i] * scale[i]; `out` may be `in`.
#define FASTDP_SCALE_ROW(name)                                                         \
    void name(const float *in, const float *scale, int64_t count, float *out) {        \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < count; ++i) out[i] = in[i] * scale[i]; \
    }
FASTDP_SCALE_ROW(scale_row_portable)
#if defined(__x86_64__)
FASTDP_AVX2 FASTDP_SCALE_ROW(scale_row_avx2)
FASTDP_AVX512 FASTDP_SCALE_ROW(scale_row_avx512)
#endif

}  // namespace

void read_row(const Factor &factor, int64_t t, int64_t start, int64_t count, float *out) {
    const int64_t stride = factor.column_stride, first = t * factor.row_stride + start * stride;
    const float *scale = factor.scale == nullptr ? nullptr : factor.scale + start;
    if (factor.element == Element::f32) {
        const float *in = static_cast<const float *>(factor.data) + first;
        if (stride == 1 && scale != nullptr) return FASTDP_BEST(scale_row)(in, scale, count, out);
        if (stride == 1) std::memcpy(out, in, count * sizeof(float));
        else for (int64_t i = 0; i < count; ++i) out[i] = in[i * stride];
    } else {
        const uint16_t *in = static_cast<const uint16_t *>(factor.data) + first;
        const bool brain = factor.element == Element::bf16;
        int64_t i = 0;
#if defined(__x86_64__)
        if (stride == 1 && isa() != Isa::portable) i = brain ? widen_bf16(in, count, out) : widen_f16(in, count, out);
#endif
        for (; i < count; ++i) out[i] = brain ? bfloat_to_float(in[i * stride]) : half_to_float(in[i * stride]);
    }
    if (scale != nullptr) FASTDP_BEST(scale_row)(out, scale, count, out);
}

}  // namespace fastdp
