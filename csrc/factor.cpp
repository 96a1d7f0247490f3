#include "factor.h"

#include <cmath>

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

// Whether all entries of a row are zero (or else: finite).
template <typename Predicate>
bool all_of_row(const Factor &factor, int64_t t, Predicate holds) {
    for (int64_t j = 0; j < factor.width; ++j)
        if (!holds(factor.entry(t, j))) return false;
    return true;
}

bool is_zero(const Factor &factor, int64_t t) {
    if (factor.element == Element::f32 && factor.column_stride == 1) {
        const float *row = factor.row(t);
        if (factor.width > 0 && row[0] != 0) return false;
        uint32_t some = 0;
        for (int64_t j = 0; j < factor.width; ++j) {
            uint32_t bits;
            std::memcpy(&bits, row + j, 4);
            some |= bits << 1;
        }
        return some == 0;
    }
    return all_of_row(factor, t, [](float x) { return x == 0; });
}

bool is_finite(const Factor &factor, int64_t t) {
    if (factor.element == Element::f32 && factor.column_stride == 1) {
        // In vectors: padding is looked at by the row.
        const float *row = factor.row(t);
        uint32_t bad = 0;
        for (int64_t j = 0; j < factor.width; ++j) {
            uint32_t bits;
            std::memcpy(&bits, row + j, 4);
            bad += (bits & 0x7f800000u) == 0x7f800000u;
        }
        return bad == 0;
    }
    return all_of_row(factor, t, [](float x) { return std::isfinite(x); });
}

}  // namespace

Tokens nonzero_tokens(const std::vector<Factor> &lefts, const Factor &right, const std::vector<int64_t> &bounds) {
    const auto every_left = [&](int64_t t, bool (*holds)(const Factor &, int64_t)) {
        for (const Factor &left : lefts)
            if (!holds(left, t)) return false;
        return true;
    };
    Tokens found;
    found.at.reserve(bounds.back() - bounds.front());
    found.bounds.reserve(bounds.size());
    found.bounds.push_back(0);
    for (size_t unit = 0; unit + 1 < bounds.size(); ++unit) {
        for (int64_t t = bounds[unit]; t < bounds[unit + 1]; ++t) {
            const bool adds_nothing = (!lefts.empty() && every_left(t, is_zero) && is_finite(right, t)) ||
                                      (is_zero(right, t) && every_left(t, is_finite));
            if (!adds_nothing) found.at.push_back(t);
        }
        found.bounds.push_back(static_cast<int64_t>(found.at.size()));
    }
    return found;
}

void read_row(const Factor &factor, int64_t t, int64_t start, int64_t count, float *out) {
    const int64_t stride = factor.column_stride, first = t * factor.row_stride + start * stride;
    if (factor.element == Element::f32) {
        const float *in = static_cast<const float *>(factor.data) + first;
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
}

}  // namespace fastdp
