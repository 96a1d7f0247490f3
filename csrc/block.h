// A block of L^T R in registers, and what its rows are reduced to, for each instruction set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "factor.h"

namespace fastdp {

constexpr int64_t kBlockRows = 6;      // with 64 columns, 24 vectors of 16 lanes: the most that leave room for operands
constexpr int64_t kBlockColumns = 64;  // one word of a mask
constexpr int64_t kChunkRows = 96;     // columns of L taken at a time
constexpr int64_t kChunkTokens = 256;  // tokens at a time: the rows of L they touch stay within reach of address translation

// Tokens of a factor as rows of floats, `pitch` apart.
struct Rows {
    const float *data;
    int64_t pitch;
};

struct BlockKernels {
    // block[i][j] (+)= sum over tokens of left[t][i] right[t][j], for i < rows <= 6 and j < columns <= 64. Of right, columns
    // are read up to the next multiple of 16. The sum is made on its own and then added, so that what was in the block is
    // rounded once a call: the bounds of rounding rely on it.
    void (*outer)(Rows left, Rows right, int64_t tokens, int64_t rows, int64_t columns, float *block, bool add);
    // Sums over those of 64 entries whose bit is set; no other is read.
    float (*sum_square)(const float *entries, uint64_t chosen);
    float (*sum_absolute)(const float *entries, uint64_t chosen);
    // target[j] += (bit j of mask ? masked : unmasked) * entries[j] for `columns` entries; a weight of 0 leaves target alone.
    void (*add_weighted)(const float *entries, uint64_t mask, float masked, float unmasked, int64_t columns, float *target);
    // The sum of the squares of `count` entries. Of 8,192 of them, a term goes through at most 136 roundings.
    float (*sum_squares)(const float *entries, int64_t count);
    // The same of their sizes.
    float (*sum_sizes)(const float *entries, int64_t count);
    // target[j] = sum over k < n of weights[k] * rows[k][j] for `count` entries, in the order of the rows; `add`: to what is there.
    void (*add_rows)(const float *const *rows, const float *weights, int64_t n, int64_t count, bool add, float *target);
    // The bits of `count` <= 64 bytes, set for each byte but 0.
    uint64_t (*mask_word)(const uint8_t *bytes, int64_t count);
};

const BlockKernels &block_kernels();

// What the entries of a gradient are reduced to; only masked_square has a second sum.
enum class Measure { square = 0, absolute = 1, masked_square = 2 };

// Adds the measure of those of 64 entries that `valid` names to `sums`; under a mask, of those outside it to sums[1].
inline void add_measure(const BlockKernels &kernels, Measure measure, const float *entries, uint64_t valid, uint64_t mask,
                        float *sums) {
    if (measure == Measure::absolute) {
        sums[0] += kernels.sum_absolute(entries, valid);
    } else if (measure == Measure::square) {
        sums[0] += kernels.sum_square(entries, valid);
    } else {
        sums[0] += kernels.sum_square(entries, valid & mask);
        sums[1] += kernels.sum_square(entries, valid & ~mask);
    }
}

// The bits of the first `columns` of 64.
inline uint64_t first_bits(int64_t columns) { return columns >= 64 ? ~uint64_t(0) : (uint64_t(1) << columns) - 1; }

// Adds up, for each unit and in their order, what its `pieces` measured: parts[(unit * pieces + piece) * 2 + which] to
// out[which * units + unit].
void sum_parts(const std::vector<double> &parts, Measure measure, int64_t units, int64_t pieces, float *out);

// A mask [rows, columns], one byte an entry, of which kernels take 64 columns of a row as a word. Masks change between calls,
// so no call keeps its words for the next.
struct MaskRows {
    const uint8_t *bytes;
    int64_t columns;

    uint64_t word(const BlockKernels &kernels, int64_t row, int64_t column) const {
        return kernels.mask_word(bytes + row * columns + column, std::min(kBlockColumns, columns - column));
    }

    // All words, row by row, for kernels that read each of them several times; none without a mask.
    std::vector<uint64_t> words(const BlockKernels &kernels, int64_t rows, int threads) const;
};

// A thread's copies of panels that cannot be read where they lie.
struct Panels {
    std::vector<float> left, right;
};

// Columns [start, start + count) of R over tokens [first, last) of a list: where they lie if few rows of L, of m, will meet
// them and they follow each other, else packed, which spares the address translation.
Rows right_panel(const Factor &right, const Tokens &tokens, int64_t first, int64_t last, int64_t start, int64_t count,
                 int64_t m, Panels &panels);

// band[rows][64] = rows [start, start + rows) of L^T R, at most kChunkRows, against a panel of R of `columns`, over tokens
// [first, last) of a list. Entries of L are read once a panel, so plain floats that follow each other stay where they are.
void compute_band(const BlockKernels &kernels, const Factor &left, Rows right, const Tokens &tokens, int64_t first,
                  int64_t last, int64_t start, int64_t rows, int64_t columns, Panels &panels, float *band);

}  // namespace fastdp
