#include "block.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "cpu.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdp {
namespace {

#if defined(__x86_64__)

template <int kRows>
FASTDP_AVX2 void outer_avx2(Rows left, Rows right, int64_t tokens, int64_t columns, float *block, bool add) {
    for (int64_t j = 0; j < columns; j += 16) {
        __m256 sum[kRows][2];
#pragma GCC unroll 6
        for (int i = 0; i < kRows; ++i) {
            sum[i][0] = _mm256_setzero_ps();
            sum[i][1] = _mm256_setzero_ps();
        }
        const float *l = left.data, *r = right.data + j;
        for (int64_t t = 0; t < tokens; ++t, l += left.pitch, r += right.pitch) {
            const __m256 r0 = _mm256_loadu_ps(r), r1 = _mm256_loadu_ps(r + 8);
#pragma GCC unroll 6
            for (int i = 0; i < kRows; ++i) {
                const __m256 li = _mm256_broadcast_ss(l + i);
                sum[i][0] = _mm256_fmadd_ps(li, r0, sum[i][0]);
                sum[i][1] = _mm256_fmadd_ps(li, r1, sum[i][1]);
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < kRows; ++i) {
            float *held = block + i * kBlockColumns + j;
            _mm256_storeu_ps(held, add ? _mm256_add_ps(sum[i][0], _mm256_loadu_ps(held)) : sum[i][0]);
            _mm256_storeu_ps(held + 8, add ? _mm256_add_ps(sum[i][1], _mm256_loadu_ps(held + 8)) : sum[i][1]);
        }
    }
}

void outer_avx2_any(Rows left, Rows right, int64_t tokens, int64_t rows, int64_t columns, float *block, bool add) {
    static constexpr void (*by_rows[6])(Rows, Rows, int64_t, int64_t, float *, bool) = {
        outer_avx2<1>, outer_avx2<2>, outer_avx2<3>, outer_avx2<4>, outer_avx2<5>, outer_avx2<6>};
    by_rows[rows - 1](left, right, tokens, columns, block, add);
}

FASTDP_AVX2 inline __m256 lanes_of(uint64_t chosen, int group) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i byte = _mm256_set1_epi32(static_cast<int>((chosen >> (8 * group)) & 0xff));
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(byte, bit), bit));
}

FASTDP_AVX2 inline float sum_of(__m256 v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

FASTDP_AVX2 float sum_square_avx2(const float *entries, uint64_t chosen) {
    __m256 sum = _mm256_setzero_ps();
    for (int group = 0; group < 8; ++group) {
        const __m256 x = _mm256_and_ps(_mm256_loadu_ps(entries + 8 * group), lanes_of(chosen, group));
        sum = _mm256_fmadd_ps(x, x, sum);
    }
    return sum_of(sum);
}

FASTDP_AVX2 float sum_absolute_avx2(const float *entries, uint64_t chosen) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 sum = _mm256_setzero_ps();
    for (int group = 0; group < 8; ++group) {
        const __m256 x = _mm256_and_ps(_mm256_loadu_ps(entries + 8 * group), lanes_of(chosen, group));
        sum = _mm256_add_ps(sum, _mm256_and_ps(x, magnitude));
    }
    return sum_of(sum);
}

FASTDP_AVX2 void add_weighted_avx2(const float *entries, uint64_t mask, float masked, float unmasked, int64_t columns,
                                   float *target) {
    for (int64_t j = 0; j < columns; ++j) {
        const float weight = (mask >> j) & 1 ? masked : unmasked;
        if (weight != 0) target[j] += weight * entries[j];
    }
}

FASTDP_AVX2 float sum_squares_avx2(const float *entries, int64_t count) {
    __m256 sum[8] = {};
    float room[kBlockColumns] = {};
    for (int64_t j = 0; j < count; j += kBlockColumns) {
        const float *from = entries + j;
        if (count - j < kBlockColumns) std::copy(from, entries + count, room), from = room;
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            const __m256 x = _mm256_loadu_ps(from + 8 * i);
            sum[i] = _mm256_fmadd_ps(x, x, sum[i]);
        }
    }
    for (int i = 0; i < 4; ++i) sum[i] = _mm256_add_ps(sum[i], sum[4 + i]);
    return sum_of(_mm256_add_ps(_mm256_add_ps(sum[0], sum[1]), _mm256_add_ps(sum[2], sum[3])));
}

FASTDP_AVX2 void add_rows_avx2(const float *const *rows, const float *weights, int64_t n, int64_t count, bool add,
                               float *target) {
    int64_t j = 0;
    for (; j + 32 <= count; j += 32) {
        __m256 sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[i] = add ? _mm256_loadu_ps(target + j + 8 * i) : _mm256_setzero_ps();
        for (int64_t k = 0; k < n; ++k) {
            const __m256 weight = _mm256_broadcast_ss(weights + k);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sum[i] = _mm256_fmadd_ps(weight, _mm256_loadu_ps(rows[k] + j + 8 * i), sum[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(target + j + 8 * i, sum[i]);
    }
    for (; j < count; ++j) {
        float sum = add ? target[j] : 0;
        for (int64_t k = 0; k < n; ++k) sum = std::fma(weights[k], rows[k][j], sum);
        target[j] = sum;
    }
}

FASTDP_AVX2 uint64_t mask_word_avx2(const uint8_t *bytes, int64_t count) {
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

template <int kRows, int kVectors>
FASTDP_AVX512 void outer_avx512(Rows left, Rows right, int64_t tokens, float *block, bool add) {
    __m512 sum[kRows][kVectors];
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j)
            sum[i][j] = _mm512_setzero_ps();
    const float *l = left.data, *r = right.data;
    for (int64_t t = 0; t < tokens; ++t, l += left.pitch, r += right.pitch) {
        __m512 x[kVectors];
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) x[j] = _mm512_loadu_ps(r + 16 * j);
#pragma GCC unroll 6
        for (int i = 0; i < kRows; ++i) {
            const __m512 li = _mm512_set1_ps(l[i]);
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; ++j) sum[i][j] = _mm512_fmadd_ps(li, x[j], sum[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < kVectors; ++j) {
            float *held = block + i * kBlockColumns + 16 * j;
            _mm512_storeu_ps(held, add ? _mm512_add_ps(sum[i][j], _mm512_loadu_ps(held)) : sum[i][j]);
        }
}

template <int kVectors>
void outer_avx512_any(Rows left, Rows right, int64_t tokens, int64_t rows, float *block, bool add) {
    static constexpr void (*by_rows[6])(Rows, Rows, int64_t, float *, bool) = {
        outer_avx512<1, kVectors>, outer_avx512<2, kVectors>, outer_avx512<3, kVectors>,
        outer_avx512<4, kVectors>, outer_avx512<5, kVectors>, outer_avx512<6, kVectors>};
    by_rows[rows - 1](left, right, tokens, block, add);
}

void outer_avx512_any(Rows left, Rows right, int64_t tokens, int64_t rows, int64_t columns, float *block, bool add) {
    if (columns > 48) outer_avx512_any<4>(left, right, tokens, rows, block, add);
    else if (columns > 32) outer_avx512_any<3>(left, right, tokens, rows, block, add);
    else if (columns > 16) outer_avx512_any<2>(left, right, tokens, rows, block, add);
    else outer_avx512_any<1>(left, right, tokens, rows, block, add);
}

FASTDP_AVX512 float sum_square_avx512(const float *entries, uint64_t chosen) {
    __m512 sum = _mm512_setzero_ps();
    for (int group = 0; group < 4; ++group) {
        const __m512 x = _mm512_maskz_loadu_ps(static_cast<__mmask16>(chosen >> (16 * group)), entries + 16 * group);
        sum = _mm512_fmadd_ps(x, x, sum);
    }
    return _mm512_reduce_add_ps(sum);
}

FASTDP_AVX512 float sum_absolute_avx512(const float *entries, uint64_t chosen) {
    __m512 sum = _mm512_setzero_ps();
    for (int group = 0; group < 4; ++group) {
        const __m512 x = _mm512_maskz_loadu_ps(static_cast<__mmask16>(chosen >> (16 * group)), entries + 16 * group);
        sum = _mm512_add_ps(sum, _mm512_abs_ps(x));
    }
    return _mm512_reduce_add_ps(sum);
}

FASTDP_AVX512 void add_weighted_avx512(const float *entries, uint64_t mask, float masked, float unmasked, int64_t columns,
                                       float *target) {
    const uint64_t valid = columns == 64 ? ~uint64_t(0) : (uint64_t(1) << columns) - 1;
    const uint64_t touched = valid & (masked != 0 ? (unmasked != 0 ? ~uint64_t(0) : mask) : ~mask);
    for (int64_t j = 0; j < columns; j += 16) {
        const auto lanes = static_cast<__mmask16>(touched >> j);
        const __m512 weight =
            _mm512_mask_blend_ps(static_cast<__mmask16>(mask >> j), _mm512_set1_ps(unmasked), _mm512_set1_ps(masked));
        const __m512 old = _mm512_maskz_loadu_ps(lanes, target + j);
        _mm512_mask_storeu_ps(target + j, lanes, _mm512_fmadd_ps(weight, _mm512_maskz_loadu_ps(lanes, entries + j), old));
    }
}

FASTDP_AVX512 float sum_squares_avx512(const float *entries, int64_t count) {
    __m512 sum[4] = {};
    int64_t j = 0;
    // Masked loads from beyond the second-level cache took twice as long.
    for (; j + kBlockColumns <= count; j += kBlockColumns) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512 x = _mm512_loadu_ps(entries + j + 16 * i);
            sum[i] = _mm512_fmadd_ps(x, x, sum[i]);
        }
    }
    for (int i = 0; i < 4 && j + 16 * i < count; ++i) {
        const auto lanes = static_cast<__mmask16>(first_bits(count - j) >> (16 * i));
        const __m512 x = _mm512_maskz_loadu_ps(lanes, entries + j + 16 * i);
        sum[i] = _mm512_fmadd_ps(x, x, sum[i]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
}

FASTDP_AVX512 void add_rows_avx512(const float *const *rows, const float *weights, int64_t n, int64_t count, bool add,
                                   float *target) {
    int64_t j = 0;
    for (; j + 64 <= count; j += 64) {
        __m512 sum[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[i] = add ? _mm512_loadu_ps(target + j + 16 * i) : _mm512_setzero_ps();
        for (int64_t k = 0; k < n; ++k) {
            const __m512 weight = _mm512_set1_ps(weights[k]);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) sum[i] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(rows[k] + j + 16 * i), sum[i]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm512_storeu_ps(target + j + 16 * i, sum[i]);
    }
    for (; j < count; j += 16) {
        const auto lanes = static_cast<__mmask16>(first_bits(count - j));
        __m512 sum = add ? _mm512_maskz_loadu_ps(lanes, target + j) : _mm512_setzero_ps();
        for (int64_t k = 0; k < n; ++k)
            sum = _mm512_fmadd_ps(_mm512_set1_ps(weights[k]), _mm512_maskz_loadu_ps(lanes, rows[k] + j), sum);
        _mm512_mask_storeu_ps(target + j, lanes, sum);
    }
}
#endif

constexpr int64_t kWordsAnItem = 4096;  // of a mask, about 10 us
constexpr int64_t kChunkTokens = 256;  // tokens at a time: the rows of L they touch stay within reach of address translation

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
#if defined(__x86_64__)
    static const BlockKernels avx2{outer_avx2_any, sum_square_avx2, sum_absolute_avx2, add_weighted_avx2,
                                   sum_squares_avx2, add_rows_avx2, mask_word_avx2};
    static const BlockKernels avx512{outer_avx512_any, sum_square_avx512, sum_absolute_avx512,
                                     add_weighted_avx512, sum_squares_avx512, add_rows_avx512, mask_word_avx2};
    if (isa() == Isa::avx512) return avx512;
    if (isa() == Isa::avx2) return avx2;
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
