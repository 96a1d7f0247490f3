// The functions of choice.h, once for each instruction set (AMX, AVX-512 VNNI, AVX2, portable C++), with equal results.
// Functions named *_body are compiled into each of them.
#include "choice.h"

#include <algorithm>
#include <cmath>

#if FASTDP_HAS_X86 && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#include <sys/syscall.h>
#include <unistd.h>
#define FASTDP_HAS_AMX 1
#else
#define FASTDP_HAS_AMX 0
#endif

#if FASTDP_HAS_X86
#include <immintrin.h>
#if !defined(__clang__)
// GCC's own AVX-512 header passes a deliberately undefined register to some builtins, and then warns of it.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#define FASTDP_VNNI __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vnni,avx2,fma")))
#define FASTDP_AMX __attribute__((target("amx-tile,amx-int8")))
#endif

namespace fastdp {
namespace {

FASTDP_BODY float total_body(const f16 &x) {
    float sum = 0;
    for (int k = 0; k < kLanes; ++k) sum += x[k];
    return sum;
}

// See ChoiceKernels::round.
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
        const b16 bytes = __builtin_convertvector(code + 128, b16);
        if (n == kLanes) {
            for (int64_t k = 0; k < kLanes; k += 4)
                std::memcpy(to + (i + k) * kLanes, reinterpret_cast<const uint8_t *>(&bytes) + k, 4);
        } else {
            for (int64_t k = 0; k < n; ++k) to[(i + k) / 4 * 4 * kLanes + k % 4] = bytes[k];
        }
    }
    int64_t square = 0;
    for (int k = 0; k < kLanes; ++k) square += codes[k];
    // As for snap (csrc/snap.cpp): rounded sums, the rounding of z itself, and what vanishes below 2^-126: squares, and,
    // where the caller flushes such numbers to zero, products of two steps.
    const float grown = 1 + (d / 8 + 64) * 0x1p-23f, floor = std::sqrt(static_cast<float>(d)) * 0x1p-55f;
    return {step, step * step * static_cast<float>(square),
            std::sqrt(total_body(losses)) * grown + std::sqrt(total_body(squares)) * grown * 0x1p-20f + floor};
}

// A lower bound of the root, 0 for 0. With y a guess of 1 / sqrt(x) and r = y sqrt(x), x y c (k - x y y) = sqrt(x) c r (k - r r),
// and c r (k - r r) is at most c 2 (k / 3)^1.5 = 1 - 2^-20 for any r: below the root whatever the guess, and within .14% of it
// for this one. No approximate instruction: draws agree between processors.
FASTDP_BODY void root_body(f16 &x) {
    constexpr float k = 2.38924456f, c = 0.703494f;
    const f16 y = (f16)(0x5f1ffff9 - ((i16)x >> 1)), xy = x * y;
    x = (xy * c) * (k - xy * y);
}

FASTDP_BODY void value_body(const uint8_t *levels, f16 &x) {
    b16 level;
    std::memcpy(&level, levels, sizeof level);
    x = (f16)(__builtin_convertvector(level, i16) << kLevelShift);
}

FASTDP_BODY void cells_body(const uint8_t *levels, float *cells) {
    f16 sum = {};
    for (int64_t i = 0; i < kBlockRowsOfTable; i += kLanes) {
        f16 x;
        value_body(levels + i, x);
        sum += x;
    }
    std::memcpy(cells, &sum, sizeof sum);
}

FASTDP_BODY void fold_body(const float *sums, int64_t laws, double *masses, int64_t stride) {
    for (int64_t l = 0; l < laws; ++l) {
        f8 half[2];
        std::memcpy(half, sums + l * kLanes, sizeof half);
        const f8 x = half[0] + half[1];
        masses[l * stride] = ((x[0] + x[4]) + (x[1] + x[5])) + ((x[2] + x[6]) + (x[3] + x[7]));
    }
}

template <class Target>
constexpr ChoiceKernels kernels_of = {
    Target::kIds,  &Target::enter, &Target::leave,                 &Target::round,                &Target::place,
    &Target::dots, &Target::one,   &Target::template weigh<false>, &Target::template weigh<true>, &Target::top,
    &Target::cells, &Target::fold};

// What all instruction sets share; each defines `at_least`, `at_most` and `store` itself.
#define FASTDP_COMMON(attribute)                                                                                     \
    attribute static EightBits round(const float *row, const float *centre, int64_t d, float scale, uint8_t *to) {   \
        return round_body(row, centre, d, scale, to);                                                                \
    }                                                                                                                \
    attribute static void cells(const uint8_t *levels, float *cells) { cells_body(levels, cells); }                  \
    attribute static void fold(const float *sums, int64_t laws, double *masses, int64_t stride) {                    \
        fold_body(sums, laws, masses, stride);                                                                       \
    }                                                                                                                \
    /* Levels before they are rounded, from upper bounds of the log weights, from lower bounds of the distances. */  \
    /* `plain`: without caps, priors and rows that are never drawn. */                                               \
    template <bool plain>                                                                                            \
    attribute static inline void height(const LawTerms &law, const f16 *group, const int32_t *dots, f16 &t) {        \
        i16 dot;                                                                                                     \
        std::memcpy(&dot, dots, sizeof dot);                                                                         \
        /* The rounding errors of a square are below 2^-21 of the sum of the two, which are lowered by 2^-20. */     \
        t = (group[1] + law.square) - __builtin_convertvector(dot - law.bias, f16) * (group[0] * law.step);          \
        at_least(t, f16{});                                                                                          \
        root_body(t);                                                                                                \
        t = t - law.lost - group[2];                                                                                 \
        at_least(t, f16{});                                                                                          \
        if (plain) {                                                                                                 \
            t = law.start - t * law.scale;                                                                           \
        } else {                                                                                                     \
            at_most(t, f16{} + law.cap);                                                                             \
            t = (group[3] + law.start) - t * law.scale;                                                              \
        }                                                                                                            \
    }                                                                                                                \
    template <bool plain>                                                                                            \
    attribute static void weigh(const LawTerms *laws, const int64_t *owner, int64_t first, int64_t count,            \
                                const GroupTerms *groups, const int32_t *dots, uint8_t *levels, float *sums) {       \
        f16 group[kGroupsAtOnce][5];                                                                                 \
        std::memcpy(group, groups, sizeof group);                                                                    \
        for (int64_t l = 0; l < count; ++l, levels += kBlockRowsOfTable, sums += kLanes) {                           \
            const int32_t *mine = dots + (owner[l] - first) * kGroupsAtOnce * kLanes;                                \
            f16 sum, t;                                                                                              \
            std::memcpy(&sum, sums, sizeof sum);                                                                     \
            for (int h = 0; h < kGroupsAtOnce; ++h) {                                                                \
                height<plain>(laws[l], group[h], mine + h * kLanes, t);                                              \
                at_least(t, plain ? f16{} + kLeastLevel : group[h][4]);                                              \
                const i16 level = __builtin_convertvector(t, i16);                                                   \
                store(level, levels + h * kLanes);                                                                   \
                sum += (f16)(level << kLevelShift);                                                                  \
            }                                                                                                        \
            std::memcpy(sums, &sum, sizeof sum);                                                                     \
        }                                                                                                            \
    }                                                                                                                \
    attribute static float top(const LawTerms &law, const GroupTerms &terms, const int32_t *dots) {                  \
        f16 group[5], t;                                                                                             \
        std::memcpy(group, &terms, sizeof group);                                                                    \
        height<false>(law, group, dots, t);                                                                          \
        float most = t[0];                                                                                           \
        for (int k = 1; k < kLanes; ++k) most = t[k] > most ? t[k] : most;                                           \
        return most;                                                                                                 \
    }

#define FASTDP_LANE_LOOPS(attribute)                                                           \
    static constexpr int kIds = 12;                                                            \
    attribute static inline void at_least(f16 &x, const f16 &least) { x = x > least ? x : least; } \
    attribute static inline void at_most(f16 &x, const f16 &most) { x = x < most ? x : most; } \
    attribute static inline void store(const i16 &level, uint8_t *to) {                        \
        const b16 bytes = __builtin_convertvector(level, b16);                                 \
        std::memcpy(to, &bytes, sizeof bytes);                                                 \
    }

struct ByRows {
    static void enter() {}
    static void leave() {}
    static void place(const int8_t *code, int64_t k, int64_t quads, int8_t *left) {
        std::copy(code, code + 4 * quads, left + k * 4 * quads);
    }
};

struct Portable : ByRows {
    FASTDP_LANE_LOOPS()
    FASTDP_COMMON()
    static void one(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots) {
        for (int k = 0; k < kLanes; ++k) dots[k] = 0;
        for (int64_t i = 0; i < quads; ++i, left += 4, group += 4 * kLanes)
            for (int k = 0; k < kLanes; ++k)
                for (int j = 0; j < 4; ++j) dots[k] += left[j] * group[4 * k + j];
    }
    static void dots(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads, int32_t *dots) {
        for (int k = 0; k < kIds; ++k, dots += kGroupsAtOnce * kLanes, left += 4 * quads) {
            one(left, group0, quads, dots);
            one(left, group1, quads, dots + kLanes);
        }
    }
};

#if FASTDP_HAS_X86
struct Avx2 : ByRows {
    FASTDP_LANE_LOOPS(FASTDP_AVX2)
    FASTDP_COMMON(FASTDP_AVX2)
    FASTDP_AVX2 static void one(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots) {
        rows<1>(left, group, quads, dots, 0);
    }
    FASTDP_AVX2 static void dots(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads,
                                 int32_t *dots) {
        for (int k = 0; k < kIds; k += 4) {
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

struct Vnni : ByRows {
    static constexpr int kIds = 12;
    FASTDP_VNNI static inline void at_least(f16 &x, const f16 &least) { x = (f16)_mm512_max_ps((__m512)x, (__m512)least); }
    FASTDP_VNNI static inline void at_most(f16 &x, const f16 &most) { x = (f16)_mm512_min_ps((__m512)x, (__m512)most); }
    FASTDP_VNNI static inline void store(const i16 &level, uint8_t *to) {
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to), _mm512_cvtepi32_epi8((__m512i)level));
    }
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
        __m512i low[kIds], high[kIds];
        for (int k = 0; k < kIds; ++k) low[k] = high[k] = _mm512_setzero_si512();
        for (int64_t i = 0; i < quads; ++i) {
            const __m512i a = _mm512_loadu_si512(group0 + i * 4 * kLanes), b = _mm512_loadu_si512(group1 + i * 4 * kLanes);
#pragma GCC unroll 12
            for (int k = 0; k < kIds; ++k) {
                low[k] = step(low[k], a, left + (k * quads + i) * 4);
                high[k] = step(high[k], b, left + (k * quads + i) * 4);
            }
        }
#pragma GCC unroll 12
        for (int k = 0; k < kIds; ++k) {
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

#if FASTDP_HAS_AMX
struct alignas(64) Tiles {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Products of 32 rows with 32 of the table, 64 entries at a time, in the matrix unit; the rest as Vnni.
struct Amx : Vnni {
    static constexpr int kIds = kIdsATile;
    FASTDP_AMX static void enter() {
        // Not on the stack: compilers take the instruction to read eight bytes, and leave the others unwritten.
        static const Tiles tiles;
        _tile_loadconfig(&tiles);
    }
    FASTDP_AMX static void leave() { _tile_release(); }
    // Tiles of sixteen rows by 64 codes, each in one piece: what is loaded follows what was loaded before.
    static void place(const int8_t *code, int64_t k, int64_t quads, int8_t *left) {
        for (int64_t i = 0; i < 4 * quads; i += 64)
            std::memcpy(left + k / kLanes * kLanes * 4 * quads + i * kLanes + k % kLanes * 64, code + i, 64);
    }
    FASTDP_AMX static void dots(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads,
                                int32_t *dots) {
        const int64_t width = 4 * quads, out = kGroupsAtOnce * kLanes * sizeof(int32_t);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t i = 0; i < width; i += 64) {
            _tile_loadd(4, left + i * kLanes, 64);
            _tile_loadd(5, left + (width + i) * kLanes, 64);
            _tile_loadd(6, group0 + i * kLanes, 64);
            _tile_loadd(7, group1 + i * kLanes, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
        _tile_stored(0, dots, out);
        _tile_stored(1, dots + kLanes, out);
        _tile_stored(2, dots + kLanes * kGroupsAtOnce * kLanes, out);
        _tile_stored(3, dots + kLanes * kGroupsAtOnce * kLanes + kLanes, out);
    }
};

// Linux lends the tiles' registers to processes that ask; without an answer nothing is lost but speed.
bool tiles_granted() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = products().tiles_int8 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
}
#endif
#endif

}  // namespace

const ChoiceKernels &choice_kernels() {
#if FASTDP_HAS_X86
#if FASTDP_HAS_AMX
    if (may_use_amx() && products().vnni && tiles_granted()) return kernels_of<Amx>;
#endif
    if (isa() == Isa::avx512 && products().vnni) return kernels_of<Vnni>;
    if (isa() >= Isa::avx2) return kernels_of<Avx2>;
#endif
    return kernels_of<Portable>;
}

}  // namespace fastdp
