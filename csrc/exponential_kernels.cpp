// Integer products by VNNI where there is one, by multiply-add of pairs with AVX2, in plain C++ elsewhere: all equal.
#include "exponential.h"

#include <cmath>

#if FASTDP_HAS_X86
#include <immintrin.h>
#if !defined(__clang__)
// GCC's own AVX-512 header passes a deliberately undefined register to some builtins, and then warns of it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define FASTDP_VNNI __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma")))
#endif

namespace fastdp {
namespace {

FASTDP_BODY void load_tail(const float *from, int64_t n, f16 &x) {
    x = f16{};
    if (n >= kLanes) std::memcpy(&x, from, sizeof x);
    else std::memcpy(&x, from, n * sizeof(float));
}

FASTDP_BODY float total_body(const f16 &x) {
    float sum = 0;
    for (int k = 0; k < kLanes; ++k) sum += x[k];
    return sum;
}

FASTDP_BODY EightBits round_body(const float *row, const float *centre, int64_t d, float scale, uint8_t *to) {
    f16 most = {}, squares = {}, losses = {};
    for (int64_t i = 0; i < d; i += kLanes) {
        f16 x, c;
        load_tail(row + i, d - i, x);
        load_tail(centre + i, d - i, c);
        const f16 z = x * scale - c * scale;
        const f16 size = (f16)((i16)z & 0x7fffffff);
        most = size > most ? size : most;
        squares += z * z;
    }
    float largest = 0;
    for (int k = 0; k < kLanes; ++k) largest = most[k] > largest ? most[k] : largest;
    // A row this close to the centre is all remainder; its step would not be a normal number.
    const float step = largest < 0x1p-100f ? 0.0f : largest / 127, inverse = step == 0.0f ? 0.0f : 127 / largest;
    i16 codes = {};
    for (int64_t i = 0; i < d; i += kLanes) {
        const int64_t n = d - i < kLanes ? d - i : kLanes;
        f16 x, c;
        load_tail(row + i, n, x);
        load_tail(centre + i, n, c);
        const f16 z = x * scale - c * scale;
        const f16 near = z * inverse + 0x1.8p23f;  // rounds to the nearest integer
        const i16 code = (i16)near - 0x4b400000;
        const f16 rest = z - __builtin_convertvector(code, f16) * step;
        losses += rest * rest;
        codes += code * code;
        for (int64_t k = 0; k < n; ++k) to[(i + k) / 4 * 4 * kLanes + k % 4] = static_cast<uint8_t>(code[k] + 128);
    }
    int64_t square = 0;
    for (int k = 0; k < kLanes; ++k) square += codes[k];
    // As for snap (csrc/snap.cpp): rounded sums, the rounding of z itself, and squares that vanish below 2^-126.
    const float grown = 1 + (d / 8 + 64) * 0x1p-23f, floor = std::sqrt(static_cast<float>(d)) * 0x1p-60f;
    return {step, step * step * static_cast<float>(square),
            std::sqrt(total_body(losses)) * grown + std::sqrt(total_body(squares)) * grown * 0x1p-20f + floor};
}

// exp(x) for x <= 0, relative error below 2^-20; exp(-87) below -87.
FASTDP_BODY void exponential(f16 &x) {
    const f16 least = f16{} - 87.0f;
    x = x > least ? x : least;
    const f16 shifted = x * 1.44269504f + 0x1.8p23f;
    const i16 n = (i16)shifted - 0x4b400000;
    const f16 whole = shifted - 0x1.8p23f;
    const f16 r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    const f16 p = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f + r * (0.041666668f + r * (0.0083333338f + r * 0.0013888889f)))));
    x = p * (f16)((n + 127) << 23);
}

// Lower bounds, squared, of the distances between rounded rows.
FASTDP_BODY void squares_body(const LawTerms &law, const GroupTerms &group, const int32_t *dots, f16 &distance) {
    f16 step, square;
    i16 dot;
    std::memcpy(&step, group.step, sizeof step);
    std::memcpy(&square, group.square, sizeof square);
    std::memcpy(&dot, dots, sizeof dot);
    const f16 zero = {};
    const f16 product = __builtin_convertvector(dot - law.bias, f16) * (step * law.step);
    // The rounding errors of these lines are below 2^-20 of the sum of the squares.
    distance = (square + law.square) * (1 - 0x1p-20f) - 2.0f * product;
    distance = distance > zero ? distance : zero;
}

// Upper bounds of the log weights, from lower bounds of the distances between rounded rows.
FASTDP_BODY void logs_body(const LawTerms &law, const GroupTerms &group, const f16 &between, f16 &bound) {
    f16 lost, slope, prior;
    std::memcpy(&lost, group.lost, sizeof lost);
    std::memcpy(&slope, group.slope, sizeof slope);
    std::memcpy(&prior, group.prior, sizeof prior);
    const f16 zero = {}, cap = zero + law.cap;
    f16 distance = between * (1 - 0x1p-22f) - (lost + law.lost);
    distance = distance > zero ? distance : zero;
    distance = distance < cap ? distance : cap;
    const f16 fall = slope * law.scale * distance;
    const f16 size = (f16)((i16)prior & 0x7fffffff), most = zero + 1e30f, least = zero - 1e38f;
    // Raised by more than float32 can lose here and in the exponential.
    bound = (prior - fall) + ((size < most ? size : most) + fall) * 0x1p-20f + 0x1p-14f;
    bound = bound > least ? bound : least;
}

FASTDP_BODY void weights_body(const float *tops, const float *sums, float top, int64_t n, float *bounds) {
    for (int64_t g = 0; g < n; g += kLanes) {
        f16 x, s;
        load_tail(tops + g, n - g, x);
        load_tail(sums + g, n - g, s);
        x -= top;
        exponential(x);
        x *= s * (1 + 0x1p-16f);
        std::memcpy(bounds + g, &x, sizeof x);
    }
}

template <class Target>
constexpr ExponentialKernels kernels_of = {&Target::round, &Target::dots, &Target::one,
                                           &Target::sum,   &Target::weigh, &Target::weights};

// What is the same for every instruction set but for `root`, `greatest` and `total`, which each names its own.
#define FASTDP_COMMON(attribute)                                                                                     \
    attribute static EightBits round(const float *row, const float *centre, int64_t d, float scale, uint8_t *to) {   \
        return round_body(row, centre, d, scale, to);                                                                \
    }                                                                                                                \
    attribute static float bounds(const LawTerms &law, const GroupTerms &group, const int32_t *dots, f16 &bound) {   \
        f16 distance;                                                                                                \
        squares_body(law, group, dots, distance);                                                                    \
        root(distance);                                                                                              \
        logs_body(law, group, distance, bound);                                                                      \
        const float top = greatest(bound);                                                                           \
        bound -= top;                                                                                                \
        exponential(bound);                                                                                          \
        return top;                                                                                                  \
    }                                                                                                                \
    attribute static void sum(const LawTerms &law, const GroupTerms &group, const int32_t *dots, float &top,         \
                              float &sum) {                                                                          \
        f16 bound;                                                                                                   \
        top = bounds(law, group, dots, bound);                                                                       \
        sum = total(bound);                                                                                          \
    }                                                                                                                \
    attribute static void weigh(const LawTerms &law, const GroupTerms &group, const int32_t *dots, float *weights) { \
        f16 bound;                                                                                                   \
        bounds(law, group, dots, bound);                                                                             \
        std::memcpy(weights, &bound, sizeof bound);                                                                  \
    }                                                                                                                \
    attribute static void weights(const float *tops, const float *sums, float top, int64_t n, float *bounds) {       \
        weights_body(tops, sums, top, n, bounds);                                                                    \
    }

#define FASTDP_LANE_LOOPS(attribute)                                                \
    attribute static void root(f16 &x) {                                            \
        for (int k = 0; k < kLanes; ++k) x[k] = std::sqrt(x[k]);                    \
    }                                                                               \
    attribute static float greatest(const f16 &x) {                                 \
        float top = x[0];                                                           \
        for (int k = 1; k < kLanes; ++k) top = x[k] > top ? x[k] : top;             \
        return top;                                                                 \
    }                                                                               \
    attribute static float total(const f16 &x) { return total_body(x); }

struct Portable {
    FASTDP_LANE_LOOPS()
    FASTDP_COMMON()
    static void one(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots) {
        for (int k = 0; k < kLanes; ++k) dots[k] = 0;
        for (int64_t i = 0; i < quads; ++i, left += 4, group += 4 * kLanes)
            for (int k = 0; k < kLanes; ++k)
                for (int j = 0; j < 4; ++j) dots[k] += left[j] * group[4 * k + j];
    }
    static void dots(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads, int32_t *dots) {
        for (int k = 0; k < kIdsAtOnce; ++k, dots += kGroupsAtOnce * kLanes, left += 4 * quads) {
            one(left, group0, quads, dots);
            one(left, group1, quads, dots + kLanes);
        }
    }
};

#if FASTDP_HAS_X86
struct Avx2 {
    FASTDP_LANE_LOOPS(FASTDP_AVX2)
    FASTDP_COMMON(FASTDP_AVX2)
    FASTDP_AVX2 static void one(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots) {
        rows<1>(left, group, quads, dots, 0);
    }
    FASTDP_AVX2 static void dots(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads,
                                 int32_t *dots) {
        for (int k = 0; k < kIdsAtOnce; k += 4) {
            rows<4>(left + 4 * quads * k, group0, quads, dots + k * kGroupsAtOnce * kLanes, kGroupsAtOnce * kLanes);
            rows<4>(left + 4 * quads * k, group1, quads, dots + (k * kGroupsAtOnce + 1) * kLanes, kGroupsAtOnce * kLanes);
        }
    }

  private:
    // Even and odd bytes apart, each a 16-bit factor of a multiply-add of pairs: no saturation, unlike vpmaddubsw.
    template <int n>
    FASTDP_AVX2 static void rows(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots, int64_t stride) {
        const __m256i low = _mm256_set1_epi32(0x00ff00ff);
        __m256i sum[n][2];
        for (auto &pair : sum) pair[0] = pair[1] = _mm256_setzero_si256();
        for (int64_t i = 0; i < quads; ++i) {
            const __m256i *at = reinterpret_cast<const __m256i *>(group + i * 4 * kLanes);
            const __m256i a = _mm256_loadu_si256(at), b = _mm256_loadu_si256(at + 1);
            const __m256i a0 = _mm256_and_si256(a, low), a1 = _mm256_and_si256(_mm256_srli_epi16(a, 8), low);
            const __m256i b0 = _mm256_and_si256(b, low), b1 = _mm256_and_si256(_mm256_srli_epi16(b, 8), low);
            for (int k = 0; k < n; ++k) {
                int32_t four;
                std::memcpy(&four, left + (k * quads + i) * 4, sizeof four);
                const __m256i q = _mm256_set1_epi32(four);
                const __m256i q0 = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), q1 = _mm256_srai_epi16(q, 8);
                sum[k][0] = _mm256_add_epi32(sum[k][0], _mm256_add_epi32(_mm256_madd_epi16(a0, q0), _mm256_madd_epi16(a1, q1)));
                sum[k][1] = _mm256_add_epi32(sum[k][1], _mm256_add_epi32(_mm256_madd_epi16(b0, q0), _mm256_madd_epi16(b1, q1)));
            }
        }
        for (int k = 0; k < n; ++k)
            for (int h = 0; h < 2; ++h)
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(dots + k * stride + 8 * h), sum[k][h]);
    }
};

struct Vnni {
    FASTDP_VNNI static void root(f16 &x) { x = (f16)_mm512_sqrt_ps((__m512)x); }
    FASTDP_VNNI static float greatest(const f16 &x) { return _mm512_reduce_max_ps((__m512)x); }
    FASTDP_VNNI static float total(const f16 &x) { return _mm512_reduce_add_ps((__m512)x); }
    FASTDP_COMMON(FASTDP_VNNI)
    FASTDP_VNNI static void one(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots) {
        __m512i sum[4];  // four chains: one would wait for its own latency
        for (auto &chain : sum) chain = _mm512_setzero_si512();
        int64_t i = 0;
        for (; i + 4 <= quads; i += 4)
            for (int j = 0; j < 4; ++j)
                sum[j] = step(sum[j], _mm512_loadu_si512(group + (i + j) * 4 * kLanes), left + 4 * (i + j));
        for (; i < quads; ++i) sum[0] = step(sum[0], _mm512_loadu_si512(group + i * 4 * kLanes), left + 4 * i);
        _mm512_storeu_si512(dots, _mm512_add_epi32(_mm512_add_epi32(sum[0], sum[1]), _mm512_add_epi32(sum[2], sum[3])));
    }
    // Twelve rows times thirty-two: 24 of the 32 registers are sums, so each byte loaded is used many times.
    FASTDP_VNNI static void dots(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads,
                                 int32_t *dots) {
        __m512i low[kIdsAtOnce], high[kIdsAtOnce];
        for (int k = 0; k < kIdsAtOnce; ++k) low[k] = high[k] = _mm512_setzero_si512();
        for (int64_t i = 0; i < quads; ++i) {
            const __m512i a = _mm512_loadu_si512(group0 + i * 4 * kLanes), b = _mm512_loadu_si512(group1 + i * 4 * kLanes);
#pragma GCC unroll 12
            for (int k = 0; k < kIdsAtOnce; ++k) {
                low[k] = step(low[k], a, left + (k * quads + i) * 4);
                high[k] = step(high[k], b, left + (k * quads + i) * 4);
            }
        }
#pragma GCC unroll 12
        for (int k = 0; k < kIdsAtOnce; ++k) {
            _mm512_storeu_si512(dots + k * kGroupsAtOnce * kLanes, low[k]);
            _mm512_storeu_si512(dots + (k * kGroupsAtOnce + 1) * kLanes, high[k]);
        }
    }

  private:
    FASTDP_VNNI static __m512i step(__m512i sum, __m512i table, const int8_t *left) {
        int32_t four;
        std::memcpy(&four, left, sizeof four);
        return _mm512_dpbusd_epi32(sum, table, _mm512_set1_epi32(four));
    }
};
#endif

}  // namespace

const ExponentialKernels &exponential_kernels() {
#if FASTDP_HAS_X86
    if (isa() == Isa::avx512 && __builtin_cpu_supports("avx512vnni")) return kernels_of<Vnni>;
    if (isa() >= Isa::avx2) return kernels_of<Avx2>;
#endif
    return kernels_of<Portable>;
}

}  // namespace fastdp
