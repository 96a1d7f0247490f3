// Squared norms of per-unit gradients through Gram matrices: sum over t, s of (L L^T o R R^T)[t, s] in each unit.
//
// A BLAS multiplies all T x T entries; this computes one triangle, a tile of tokens at a time, and never stores a Gram
// matrix. The dot products run along the rows as they lie in memory, so nothing is packed or transposed.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "bounds.h"
#include "cpu.h"
#include "factor.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fastdp {
namespace {

constexpr int64_t kTile = 64;     // tokens a side of a tile: two panels of kDepth columns fit a 1 MB second-level cache
constexpr int64_t kDepth = 1024;  // columns a pass: eight rows of them fit a 32 KB first-level cache
constexpr int64_t kBlock = 4;     // tokens a side of the block held in registers

// g[i][j] (+)= a[i] . b[j] for a block of 4 x 4 rows.
using DotBlock = void (*)(const float *const *a, const float *const *b, int64_t depth, float *g, bool add);

#if defined(__x86_64__)

FASTDP_AVX2 void dot_block_avx2(const float *const *a, const float *const *b, int64_t depth, float *g, bool add) {
    const __m256i lane_index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i tail = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(depth % 8)), lane_index);
    for (int64_t i = 0; i < kBlock; i += 2) {
        __m256 sum[2][4];
        for (auto &row : sum)
            for (auto &entry : row) entry = _mm256_setzero_ps();
        int64_t k = 0;
        for (; k + 8 <= depth; k += 8) {
            const __m256 a0 = _mm256_loadu_ps(a[i] + k), a1 = _mm256_loadu_ps(a[i + 1] + k);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m256 bj = _mm256_loadu_ps(b[j] + k);
                sum[0][j] = _mm256_fmadd_ps(a0, bj, sum[0][j]);
                sum[1][j] = _mm256_fmadd_ps(a1, bj, sum[1][j]);
            }
        }
        if (k < depth) {
            const __m256 a0 = _mm256_maskload_ps(a[i] + k, tail), a1 = _mm256_maskload_ps(a[i + 1] + k, tail);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m256 bj = _mm256_maskload_ps(b[j] + k, tail);
                sum[0][j] = _mm256_fmadd_ps(a0, bj, sum[0][j]);
                sum[1][j] = _mm256_fmadd_ps(a1, bj, sum[1][j]);
            }
        }
        for (int row = 0; row < 2; ++row) {
            const __m256 low = _mm256_hadd_ps(sum[row][0], sum[row][1]), high = _mm256_hadd_ps(sum[row][2], sum[row][3]);
            const __m256 halves = _mm256_hadd_ps(low, high);
            __m128 total = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
            float *out = g + (i + row) * kTile;
            if (add) total = _mm_add_ps(total, _mm_loadu_ps(out));
            _mm_storeu_ps(out, total);
        }
    }
}

// Four vectors to one whose every 128-bit lane holds the lane's four sums.
FASTDP_AVX512 inline __m512 sum_lanes(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d p = _mm512_castps_pd(ab), q = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
}

// Two vectors to one: the sums of neighbouring 128-bit lanes, first those of a, then those of b.
FASTDP_AVX512 inline __m512 fold_lanes(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

FASTDP_AVX512 void dot_block_avx512(const float *const *a, const float *const *b, int64_t depth, float *g, bool add) {
    __m512 sum[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_setzero_ps();
    const float *a0 = a[0], *a1 = a[1], *a2 = a[2], *a3 = a[3];
    const float *b0 = b[0], *b1 = b[1], *b2 = b[2], *b3 = b[3];
    const auto step = [&](__mmask16 lanes, int64_t k) FASTDP_AVX512 __attribute__((always_inline)) {
        const __m512 y[4] = {_mm512_maskz_loadu_ps(lanes, b0 + k), _mm512_maskz_loadu_ps(lanes, b1 + k),
                             _mm512_maskz_loadu_ps(lanes, b2 + k), _mm512_maskz_loadu_ps(lanes, b3 + k)};
        const __m512 x[4] = {_mm512_maskz_loadu_ps(lanes, a0 + k), _mm512_maskz_loadu_ps(lanes, a1 + k),
                             _mm512_maskz_loadu_ps(lanes, a2 + k), _mm512_maskz_loadu_ps(lanes, a3 + k)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) sum[i][j] = _mm512_fmadd_ps(x[i], y[j], sum[i][j]);
    };
    int64_t k = 0;
    for (; k + 16 <= depth; k += 16) step(__mmask16(0xffff), k);
    if (k < depth) step(__mmask16((1u << (depth - k)) - 1), k);
    __m512 rows[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) rows[i] = sum_lanes(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
    const __m512 all = fold_lanes(fold_lanes(rows[0], rows[1]), fold_lanes(rows[2], rows[3]));
    __m128 total[4] = {_mm512_castps512_ps128(all), _mm512_extractf32x4_ps(all, 1), _mm512_extractf32x4_ps(all, 2),
                       _mm512_extractf32x4_ps(all, 3)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        float *out = g + i * kTile;
        if (add) total[i] = _mm_add_ps(total[i], _mm_loadu_ps(out));
        _mm_storeu_ps(out, total[i]);
    }
}
#endif

DotBlock dot_block() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return dot_block_avx512;
    if (isa() == Isa::avx2) return dot_block_avx2;
#endif
    throw std::runtime_error("Gram kernels need AVX2; the torch route serves other processors");
}

// Tokens [row, row + rows) of one use's list against tokens [column, column + columns) of another's, or of its own.
struct Tile {
    int64_t unit, row, rows, column, columns;
    bool lower;  // only entries on and below the diagonal are wanted: rows and columns are the same tokens
};

struct Scratch {
    std::vector<float> panel_a, panel_b;
    alignas(64) float gram_right[kTile * kTile], gram_left[kTile * kTile];
};

// Pointers to the rows of a panel of a factor: into the factor itself where it holds plain floats, else into a copy.
void panel_rows(const Factor &factor, const int64_t *tokens, int64_t count, int64_t start, int64_t depth,
                std::vector<float> &copy, const float **rows) {
    if (factor.plain()) {
        for (int64_t i = 0; i < count; ++i) rows[i] = factor.row(tokens[i]) + start;
    } else {
        copy.resize(kTile * kDepth);
        for (int64_t i = 0; i < count; ++i) {
            read_row(factor, tokens[i], start, depth, copy.data() + i * kDepth);
            rows[i] = copy.data() + i * kDepth;
        }
    }
    // Blocks past the last token repeat it; the entries are not summed.
    for (int64_t i = count; i < (count + kBlock - 1) / kBlock * kBlock; ++i) rows[i] = rows[count - 1];
}

// gram[i][j] = x[at_x[row + i]] . y[at_y[column + j]] over a tile.
void gram_tile(const Factor &x, const int64_t *at_x, const Factor &y, const int64_t *at_y, const Tile &tile, DotBlock dot,
               Scratch &scratch, float *gram) {
    if (x.width == 0) std::fill(gram, gram + kTile * kTile, 0.0f);
    const float *a[kTile], *b[kTile];
    for (int64_t start = 0; start < x.width; start += kDepth) {
        const int64_t depth = std::min(kDepth, x.width - start);
        panel_rows(x, at_x + tile.row, tile.rows, start, depth, scratch.panel_a, a);
        if (!tile.lower) panel_rows(y, at_y + tile.column, tile.columns, start, depth, scratch.panel_b, b);
        for (int64_t i = 0; i < tile.rows; i += kBlock)
            for (int64_t j = 0; j < (tile.lower ? i + 1 : tile.columns); j += kBlock)
                dot(a + i, (tile.lower ? a : b) + j, depth, gram + i * kTile + j, start > 0);
    }
}

// Sum of the products of two Gram tiles; of a lower triangle the entries off the diagonal count twice.
double tile_product(const float *x, const float *y, const Tile &tile) {
    double total = 0;
    for (int64_t i = 0; i < tile.rows; ++i) {
        const float *p = x + i * kTile, *q = y + i * kTile;
        double row = 0;
        for (int64_t j = 0; j < (tile.lower ? i : tile.columns); ++j) row += double(p[j]) * q[j];
        total += tile.lower ? 2 * row + double(p[i]) * q[i] : row;
    }
    return total;
}

// Adds the tiles' parts up in their order, whichever thread computed them, so that results do not depend on threads.
void sum_parts(const std::vector<Tile> &tiles, const std::vector<double> &parts, int64_t uses, int64_t units, float *out,
               bool square) {
    std::vector<double> total(uses * units);
    for (size_t item = 0; item < tiles.size(); ++item)
        for (int64_t use = 0; use < uses; ++use) total[use * units + tiles[item].unit] += parts[item * uses + use];
    // Rounding can leave a vanishing square below zero; NaN is kept.
    for (int64_t i = 0; i < uses * units; ++i) out[i] = square && total[i] < 0 ? 0.0f : static_cast<float>(total[i]);
}

// Sum over the tokens of a tile on the diagonal of |L_t| |R_t|, whose squares are the diagonals of the Gram matrices.
double diagonal_products(const float *left, const float *right, int64_t tokens, int64_t m, int64_t n) {
    double total = 0;
    for (int64_t i = 0; i < tokens; ++i)
        total += std::sqrt(padded(left[i * (kTile + 1)], m)) * std::sqrt(padded(right[i * (kTile + 1)], n));
    return total;
}

// out[use][unit], float32: the squared norm of left^T right over tokens [bounds[unit], bounds[unit + 1]), not below 0, and
// 0 where there are none; lefts [tokens, m_i] and right [tokens, n] as factor.h reads them. Inner products of rows are
// float32, their products are added up in float64, in an order that neither threads nor zero tokens change. Units with more
// tokens than `most` that add anything get 0. Unless `sums` is null, float64 [use][unit] of what rounding is measured by goes
// there: see bounds.h; and unless `counts` is, how many tokens of each unit add anything, float64 [unit].
void gram_sqnorm(const std::vector<Factor> &lefts, const Factor &right, const std::vector<int64_t> &bounds, int64_t most,
                 float *out, double *sums, double *counts, int threads) {
    const Tokens tokens = nonzero_tokens(lefts, right, bounds);
    if (counts != nullptr) tokens.write_counts(counts);
    const int64_t *at = tokens.at.data();
    const int64_t units = tokens.units(), uses = static_cast<int64_t>(lefts.size());
    std::vector<Tile> tiles;
    for (int64_t unit = 0; unit < units; ++unit) {
        const int64_t first = tokens.bounds[unit], last = tokens.bounds[unit + 1];
        if (last - first > most) continue;
        for (int64_t row = first; row < last; row += kTile)
            for (int64_t column = first; column <= row; column += kTile)
                tiles.push_back({unit, row, std::min(kTile, last - row), column, std::min(kTile, last - column), row == column});
    }
    std::vector<double> parts(tiles.size() * uses), products(sums != nullptr ? tiles.size() * uses : 0);
    const DotBlock dot = dot_block();
    team_for(static_cast<int64_t>(tiles.size()), threads, [&](int64_t item) {
        static thread_local Scratch scratch;
        const Tile &tile = tiles[item];
        gram_tile(right, at, right, at, tile, dot, scratch, scratch.gram_right);
        for (int64_t use = 0; use < uses; ++use) {
            gram_tile(lefts[use], at, lefts[use], at, tile, dot, scratch, scratch.gram_left);
            const double product = tile_product(scratch.gram_right, scratch.gram_left, tile);
            // A tile left of the diagonal stands for its mirror image too.
            parts[item * uses + use] = tile.lower ? product : 2 * product;
            if (sums != nullptr && tile.lower)
                products[item * uses + use] = diagonal_products(scratch.gram_left, scratch.gram_right, tile.rows,
                                                                lefts[use].width, right.width);
        }
    });
    sum_parts(tiles, parts, uses, units, out, true);
    if (sums == nullptr) return;
    std::fill(sums, sums + uses * units, 0.0);
    for (size_t item = 0; item < tiles.size(); ++item)
        for (int64_t use = 0; use < uses; ++use) sums[use * units + tiles[item].unit] += products[item * uses + use];
}

// The left factor of one side of an inner product: a matrix, or ids that stand for one-hot rows.
struct Left {
    Factor matrix;
    const int64_t *ids;
    int64_t stride;
    int64_t id(int64_t t) const { return ids[t * stride]; }
};

void left_tile(const Left &x, const int64_t *at_x, const Left &y, const int64_t *at_y, const Tile &tile, DotBlock dot,
               Scratch &scratch, float *gram) {
    if (x.ids == nullptr && y.ids == nullptr) return gram_tile(x.matrix, at_x, y.matrix, at_y, tile, dot, scratch, gram);
    for (int64_t i = 0; i < tile.rows; ++i) {
        for (int64_t j = 0; j < tile.columns; ++j) {
            const int64_t t = at_x[tile.row + i], s = at_y[tile.column + j];
            float *entry = gram + i * kTile + j;
            if (x.ids != nullptr && y.ids != nullptr) *entry = x.id(t) == y.id(s) ? 1.0f : 0.0f;
            else *entry = x.ids != nullptr ? y.matrix.entry(s, x.id(t)) : x.matrix.entry(t, y.id(s));
        }
    }
}

using LeftTuple = std::tuple<FactorTuple, uintptr_t, int64_t>;

Left left_of(const LeftTuple &t) {
    return {factor_of(std::get<0>(t)), reinterpret_cast<const int64_t *>(std::get<1>(t)), std::get<2>(t)};
}

Tokens tokens_of(const Left &left, const Factor &right, const std::vector<int64_t> &bounds) {
    return nonzero_tokens(left.ids != nullptr ? std::vector<Factor>{} : std::vector<Factor>{left.matrix}, right, bounds);
}

// out[unit], float32: the sum over tokens t of use 1 and s of use 2, both of the unit, of <left1[t], left2[s]> <right1[t],
// right2[s]>; arithmetic as in gram_sqnorm. A left factor may be int64 ids; against a matrix they lie within its width.
void cross_inner(const LeftTuple &left1_tuple, const Factor &right1, const LeftTuple &left2_tuple, const Factor &right2,
                 const std::vector<int64_t> &bounds1, const std::vector<int64_t> &bounds2, float *out, int threads) {
    const Left left1 = left_of(left1_tuple), left2 = left_of(left2_tuple);
    const Tokens one = tokens_of(left1, right1, bounds1), two = tokens_of(left2, right2, bounds2);
    const int64_t units = one.units();
    std::vector<Tile> tiles;
    for (int64_t unit = 0; unit < units; ++unit)
        for (int64_t row = one.bounds[unit]; row < one.bounds[unit + 1]; row += kTile)
            for (int64_t column = two.bounds[unit]; column < two.bounds[unit + 1]; column += kTile)
                tiles.push_back({unit, row, std::min(kTile, one.bounds[unit + 1] - row), column,
                                 std::min(kTile, two.bounds[unit + 1] - column), false});
    std::vector<double> parts(tiles.size());
    const DotBlock dot = dot_block();
    team_for(static_cast<int64_t>(tiles.size()), threads, [&](int64_t item) {
        static thread_local Scratch scratch;
        gram_tile(right1, one.at.data(), right2, two.at.data(), tiles[item], dot, scratch, scratch.gram_right);
        left_tile(left1, one.at.data(), left2, two.at.data(), tiles[item], dot, scratch, scratch.gram_left);
        parts[item] = tile_product(scratch.gram_right, scratch.gram_left, tiles[item]);
    });
    sum_parts(tiles, parts, 1, units, out, false);
}

}  // namespace

void bind_norms_gram(pybind11::module_ &m) {
    bind(m, "gram_sqnorm", &gram_sqnorm, "lefts", "right", "bounds", "most", "out", "products", "counts",
         "threads");
    bind(m, "cross_inner", &cross_inner, "left1", "right1", "left2", "right2", "bounds1", "bounds2", "out", "threads");
}

}  // namespace fastdp
