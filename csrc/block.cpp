#include "block.h"

#include <algorithm>
#include <stdexcept>

#include "cpu.h"
#include "team.h"

#if FASTDP_HAS_X86
#include <immintrin.h>
#endif

namespace fastdp {
namespace {

#if FASTDP_HAS_X86

FASTDP_AVX2 uint64_t mask_word(const uint8_t *bytes, int64_t count) {
    uint8_t room[kBlockColumns] = {};
    if (count < kBlockColumns) std::copy(bytes, bytes + count, room), bytes = room;
    uint64_t zeros = 0;
    for (int i = 0; i < 2; ++i) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(bytes) + i);
        const int found = _mm256_movemask_epi8(_mm256_cmpeq_epi8(x, _mm256_setzero_si256()));
        zeros |= static_cast<uint64_t>(static_cast<uint32_t>(found)) << (32 * i);
    }
    return ~zeros;
}

namespace avx2 {
#define FASTDP_TARGET FASTDP_AVX2
constexpr int LANES = 8, HELD = 2;
using vf = __m256;
FASTDP_AVX2 inline __m256i lanes_of(uint64_t chosen) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(chosen & 0xff)), bit), bit);
}
FASTDP_AVX2 inline vf all(float x) { return _mm256_set1_ps(x); }
FASTDP_AVX2 inline vf load(const float *at) { return _mm256_loadu_ps(at); }
FASTDP_AVX2 inline vf load(const float *at, uint64_t chosen) { return _mm256_maskload_ps(at, lanes_of(chosen)); }
FASTDP_AVX2 inline void store(float *at, vf x) { _mm256_storeu_ps(at, x); }
FASTDP_AVX2 inline void store(float *at, uint64_t chosen, vf x) { _mm256_maskstore_ps(at, lanes_of(chosen), x); }
FASTDP_AVX2 inline vf pick(uint64_t chosen, float yes, float no) {
    return _mm256_blendv_ps(all(no), all(yes), _mm256_castsi256_ps(lanes_of(chosen)));
}
FASTDP_AVX2 inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
FASTDP_AVX2 inline vf magnitude(vf x) { return _mm256_andnot_ps(all(-0.0f), x); }
FASTDP_AVX2 inline float sum_of(vf v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
#include "block_lanes.inc"
#undef FASTDP_TARGET
}  // namespace avx2

namespace avx512 {
#define FASTDP_TARGET FASTDP_AVX512
constexpr int LANES = 16, HELD = 4;
using vf = __m512;
FASTDP_AVX512 inline vf all(float x) { return _mm512_set1_ps(x); }
FASTDP_AVX512 inline vf load(const float *at) { return _mm512_loadu_ps(at); }
FASTDP_AVX512 inline vf load(const float *at, uint64_t chosen) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(chosen), at);
}
FASTDP_AVX512 inline void store(float *at, vf x) { _mm512_storeu_ps(at, x); }
FASTDP_AVX512 inline void store(float *at, uint64_t chosen, vf x) {
    _mm512_mask_storeu_ps(at, static_cast<__mmask16>(chosen), x);
}
FASTDP_AVX512 inline vf pick(uint64_t chosen, float yes, float no) {
    return _mm512_mask_blend_ps(static_cast<__mmask16>(chosen), all(no), all(yes));
}
FASTDP_AVX512 inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
FASTDP_AVX512 inline vf magnitude(vf x) { return _mm512_abs_ps(x); }
FASTDP_AVX512 inline float sum_of(vf v) { return _mm512_reduce_add_ps(v); }
#include "block_lanes.inc"
#undef FASTDP_TARGET
}  // namespace avx512
#endif

constexpr int64_t kWordsAnItem = 4096;  // of a mask, about 10 us

// Columns [start, start + count) of tokens [first, last) of a list, copied to rows of `pitch` floats, zero past `count`.
Rows packed(const Factor &factor, const Tokens &tokens, int64_t first, int64_t last, int64_t start, int64_t count,
            int64_t pitch, std::vector<float> &out) {
    out.resize(std::max<int64_t>(out.size(), (last - first) * pitch));
    for (int64_t t = first; t < last; ++t) {
        float *row = out.data() + (t - first) * pitch;
        read_row(factor, tokens.at[t], start, count, row);
        std::fill(row + count, row + pitch, 0.0f);
    }
    return {out.data(), pitch};
}

}  // namespace

const BlockKernels &block_kernels() {
#if FASTDP_HAS_X86
    if (isa() == Isa::avx512) return avx512::kernels;
    if (isa() == Isa::avx2) return avx2::kernels;
#endif
    throw std::runtime_error("direct kernels need AVX2; the torch route serves other processors");
}

void sum_parts(const std::vector<double> &parts, Measure measure, int64_t units, int64_t pieces, float *out) {
    for (int64_t which = 0; which < (measure == Measure::masked_square ? 2 : 1); ++which) {
        for (int64_t unit = 0; unit < units; ++unit) {
            double total = 0;
            for (int64_t piece = 0; piece < pieces; ++piece) total += parts[(unit * pieces + piece) * 2 + which];
            out[which * units + unit] = static_cast<float>(total);
        }
    }
}

std::vector<uint64_t> MaskRows::words(const BlockKernels &kernels, int64_t rows, int threads) const {
    if (bytes == nullptr) return {};
    const int64_t a_row = (columns + kBlockColumns - 1) / kBlockColumns, n = rows * a_row;
    std::vector<uint64_t> found(n);
    team_for((n + kWordsAnItem - 1) / kWordsAnItem, threads, [&](int64_t item) {
        for (int64_t i = item * kWordsAnItem; i < std::min(n, (item + 1) * kWordsAnItem); ++i)
            found[i] = word(kernels, i / a_row, i % a_row * kBlockColumns);
    });
    return found;
}

Rows right_panel(const Factor &right, const Tokens &tokens, int64_t first, int64_t last, int64_t start, int64_t count,
                 int64_t m, Panels &panels) {
    if (right.plain() && count == kBlockColumns && m <= kChunkRows && tokens.adjacent(first, last))
        return {right.row(tokens.at[first]) + start, right.row_stride};
    return packed(right, tokens, first, last, start, count, kBlockColumns, panels.right);
}

void compute_band(const BlockKernels &kernels, const Factor &left, Rows right, const Tokens &tokens, int64_t first,
                  int64_t last, int64_t start, int64_t rows, int64_t columns, Panels &panels, float *band) {
    // As few blocks as possible, as equal as possible.
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows, step = (rows + blocks - 1) / blocks;
    for (int64_t token = first; token < last; token += kChunkTokens) {
        const int64_t end = std::min(last, token + kChunkTokens);
        const Rows l = left.plain() && tokens.adjacent(token, end)
                           ? Rows{left.row(tokens.at[token]) + start, left.row_stride}
                           : packed(left, tokens, token, end, start, rows, kChunkRows, panels.left);
        const Rows r{right.data + (token - first) * right.pitch, right.pitch};
        for (int64_t row = 0; row < rows; row += step)
            kernels.outer({l.data + row, l.pitch}, r, end - token, std::min(step, rows - row), columns,
                          band + row * kBlockColumns, token > first);
    }
}

}  // namespace fastdp
