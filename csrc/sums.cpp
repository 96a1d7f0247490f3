// Sums of token gradients: weighted ones under a mask, from bands that are never written whole, rows of R into a table, and
// a layer norm's by unit.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings.h"
#include "block.h"
#include "cpu.h"
#include "factor.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kColumns = 512;  // columns of a table's row added at a time
constexpr int64_t kWords = kColumns / kBlockColumns;
constexpr int64_t kTokens = 64;  // tokens added up in float32 before their sum is

// weight[j] += g[j] (x[j] - mean) rstd and bias[j] += g[j] for j < count.
using AffineRow = void (*)(const float *g, const float *x, float mean, float rstd, int64_t count, float *weight, float *bias);

#define FASTDP_AFFINE_ROW(name)                                                                                       \
    void name(const float *__restrict g, const float *__restrict x, float mean, float rstd, int64_t count,            \
              float *__restrict weight, float *__restrict bias) {                                                     \
        for (int64_t j = 0; j < count; ++j) {                                                                         \
            weight[j] += g[j] * ((x[j] - mean) * rstd);                                                               \
            bias[j] += g[j];                                                                                          \
        }                                                                                                             \
    }
FASTDP_AFFINE_ROW(affine_row_portable)
#if defined(__x86_64__)
FASTDP_AVX2 FASTDP_AFFINE_ROW(affine_row_avx2)
FASTDP_AVX512 FASTDP_AFFINE_ROW(affine_row_avx512)
#endif

// Sums over each unit's tokens of G (X - mean) rstd, then of G: out float32 [2, units, width]. Rows of G that are zero are
// left out.
void affine_sums(const Factor &gradient, const Factor &x, const float *mean, const float *rstd,
                 const std::vector<int64_t> &bounds, float *out, int threads) {
    const Tokens tokens = nonzero_tokens({}, gradient, bounds);
    const int64_t n = x.width, units = tokens.units(), panels = (n + kColumns - 1) / kColumns;
    const AffineRow add = FASTDP_BEST(affine_row);
    team_for(units * panels, threads, [&](int64_t item) {
        const int64_t unit = item / panels, start = item % panels * kColumns, count = std::min(kColumns, n - start);
        float *totals[2] = {out + unit * n + start, out + (units + unit) * n + start};
        for (float *total : totals) std::fill(total, total + count, 0.0f);
        alignas(64) float sums[2][kColumns], rows[2][kColumns];
        for (int64_t first = tokens.bounds[unit]; first < tokens.bounds[unit + 1]; first += kTokens) {
            for (float *sum : sums) std::fill(sum, sum + count, 0.0f);
            for (int64_t i = first; i < std::min(tokens.bounds[unit + 1], first + kTokens); ++i) {
                const int64_t t = tokens.at[i];
                const float *g = gradient.plain() ? gradient.row(t) + start : rows[0];
                const float *from = x.plain() ? x.row(t) + start : rows[1];
                if (g == rows[0]) read_row(gradient, t, start, count, rows[0]);
                if (from == rows[1]) read_row(x, t, start, count, rows[1]);
                add(g, from, mean[t], rstd[t], count, sums[0], sums[1]);
            }
            for (int64_t side = 0; side < 2; ++side)
                for (int64_t j = 0; j < count; ++j) totals[side][j] += sums[side][j];
        }
    });
}

// The sum over tokens of w_t L_t R_t^T added to `out`, with one weight for masked and another for unmasked entries. Runs of
// tokens with the same weights (a unit's) are multiplied once and scaled under the mask as they are added: run r is tokens
// [bounds[r], bounds[r + 1]) with weights masked[r] and unmasked[r], and is skipped where both are 0. `out` float32 [m, n],
// rows `out_row` apart, columns next to each other; `mask` bytes [m, n].
void masked_weighted_sum(const Factor &left, const Factor &right, const std::vector<int64_t> &bounds,
                         const std::vector<float> &masked, const std::vector<float> &unmasked, const uint8_t *mask,
                         float *out, int64_t out_row, int threads) {
    Tokens tokens;
    tokens.at.resize(bounds.back());
    std::iota(tokens.at.begin(), tokens.at.end(), 0);
    const int64_t m = left.width, n = right.width;
    const int64_t panels = (n + kBlockColumns - 1) / kBlockColumns, chunks = (m + kChunkRows - 1) / kChunkRows;
    const BlockKernels &kernels = block_kernels();
    const std::vector<uint64_t> words = MaskRows{mask, n}.words(kernels, m, threads);
    team_for(panels * chunks, threads, [&](int64_t item) {
        static thread_local Panels panels_of_thread;
        const int64_t panel = item % panels, start = item / panels * kChunkRows;
        const int64_t columns = std::min(kBlockColumns, n - panel * kBlockColumns), rows = std::min(kChunkRows, m - start);
        alignas(64) float band[kChunkRows * kBlockColumns];
        for (size_t run = 0; run < masked.size(); ++run) {
            const int64_t first = bounds[run], last = bounds[run + 1];
            if (first == last || (masked[run] == 0 && unmasked[run] == 0)) continue;
            const Rows r = right_panel(right, tokens, first, last, panel * kBlockColumns, columns, rows, panels_of_thread);
            compute_band(kernels, left, r, tokens, first, last, start, rows, columns, panels_of_thread, band);
            for (int64_t row = 0; row < rows; ++row)
                kernels.add_weighted(band + row * kBlockColumns, words[(start + row) * panels + panel], masked[run],
                                     unmasked[run], columns, out + (start + row) * out_row + panel * kBlockColumns);
        }
    });
}

// Of each pair the sum over units of weights[pair][unit] times the unit's gradient, written to outs[pair], float32 [m, n], or
// added to it where that was `begun`. The narrower factor is scaled; a unit of weight 0 is not read. Each entry is added up over
// kChunkTokens tokens at a time, in their order.
constexpr int64_t kScaledFloats = 1 << 18;  // scaled factors that are held at a time, but for the last: 1 MB
void weighted_sum_group(const std::vector<Factor> &lefts, const std::vector<Factor> &rights, const std::vector<int64_t> &bounds,
                        const float *weights, const std::vector<uintptr_t> &outs, const std::vector<bool> &begun, int threads) {
    const int64_t pairs = static_cast<int64_t>(lefts.size()), units = static_cast<int64_t>(bounds.size()) - 1;
    const BlockKernels &kernels = block_kernels();
    std::vector<Tokens> tokens(pairs);
    std::vector<std::vector<float>> scaled(pairs);
    std::vector<std::pair<int64_t, int64_t>> items;
    const auto turned = [&](int64_t pair) { return rights[pair].width < lefts[pair].width; };
    const auto scale = [&](int64_t pair) {
        const Factor &narrow = turned(pair) ? rights[pair] : lefts[pair];
        scaled[pair].resize(bounds.back() * narrow.width);
        for (int64_t unit = 0; unit < units; ++unit) {
            const float weight = weights[pair * units + unit];
            for (int64_t t = bounds[unit]; weight != 0 && t < bounds[unit + 1]; ++t) {
                float *row = scaled[pair].data() + t * narrow.width;
                read_row(narrow, t, 0, narrow.width, row);
                for (int64_t j = 0; j < narrow.width; ++j) row[j] *= weight;
                tokens[pair].at.push_back(t);
            }
        }
    };
    const auto sum = [&](int64_t item) {
        static thread_local Panels panels_of_thread;
        const auto [pair, at] = items[item];
        const Factor &wide = turned(pair) ? lefts[pair] : rights[pair];
        const int64_t width = std::min(lefts[pair].width, rights[pair].width), columns = std::min(kBlockColumns, wide.width - at);
        const int64_t count = static_cast<int64_t>(tokens[pair].at.size());
        const Factor narrow{scaled[pair].data(), Element::f32, width, width, 1};
        float *out = reinterpret_cast<float *>(outs[pair]);
        alignas(64) float total[kChunkRows * kBlockColumns], band[kChunkRows * kBlockColumns];
        for (int64_t start = 0; start < width; start += kChunkRows) {
            const int64_t rows = std::min(kChunkRows, width - start);
            std::fill_n(total, rows * kBlockColumns, 0.0f);
            for (int64_t first = 0; first < count; first += kChunkTokens) {
                const int64_t last = std::min(count, first + kChunkTokens);
                const Rows r = right_panel(wide, tokens[pair], first, last, at, columns, rows, panels_of_thread);
                compute_band(kernels, narrow, r, tokens[pair], first, last, start, rows, columns, panels_of_thread, band);
                for (int64_t i = 0; i < rows * kBlockColumns; ++i) total[i] += band[i];
            }
            const int64_t down = turned(pair) ? 1 : wide.width, across = turned(pair) ? width : 1;
            for (int64_t row = 0; row < rows; ++row)
                for (int64_t j = 0; j < columns; ++j) {
                    float &entry = out[(start + row) * down + (at + j) * across];
                    entry = begun[pair] ? entry + total[row * kBlockColumns + j] : total[row * kBlockColumns + j];
                }
        }
    };
    for (int64_t begin = 0, end = 0; begin < pairs; begin = end) {
        items.clear();
        for (int64_t floats = 0; end < pairs && floats < kScaledFloats; ++end) {
            const auto [narrow, wide] = std::minmax(lefts[end].width, rights[end].width);
            floats += bounds.back() * narrow;
            for (int64_t at = 0; at < wide; at += kBlockColumns) items.emplace_back(end, at);
        }
        team_for(end - begin, threads, [&](int64_t index) { scale(begin + index); });
        team_for(static_cast<int64_t>(items.size()), threads, sum);
        for (int64_t pair = begin; pair < end; ++pair) std::vector<float>().swap(scaled[pair]);
    }
}

// out[ids[t]] += masked[t] * R[t] for t < tokens: `out` float32, rows `out_stride` apart and columns next to each other; `masked`
// float32, contiguous; tokens of weight 0 are not read. With `bytes`, a mask over the table, `unmasked` are the weights of entries
// outside. Each thread owns columns, so tokens are added in their order whatever the threads.
void onehot_add(const int64_t *ids, int64_t ids_stride, const Factor &right, int64_t tokens, const float *masked,
                const float *unmasked, const uint8_t *bytes, float *out, int64_t out_stride, int threads) {
    const MaskRows mask{bytes, right.width};
    const int64_t words_a_row = (right.width + kBlockColumns - 1) / kBlockColumns;
    const int64_t words = std::clamp<int64_t>(words_a_row / std::max(1, threads), 1, kWords);
    const BlockKernels *kernels = bytes == nullptr ? nullptr : &block_kernels();
    team_for((words_a_row + words - 1) / words, threads, [&](int64_t panel) {
        const int64_t start = panel * words * kBlockColumns;
        const int64_t count = std::min(words * kBlockColumns, right.width - start);
        float row[kColumns];
        for (int64_t t = 0; t < tokens; ++t) {
            if (masked[t] == 0 && (bytes == nullptr || unmasked[t] == 0)) continue;
            const float *from = right.plain() ? right.row(t) + start : row;
            if (from == row) read_row(right, t, start, count, row);
            const int64_t id = ids[t * ids_stride];
            float *target = out + id * out_stride + start;
            if (bytes == nullptr)
                for (int64_t j = 0; j < count; ++j) target[j] += masked[t] * from[j];
            else
                for (int64_t j = 0; j < count; j += kBlockColumns)
                    kernels->add_weighted(from + j, mask.word(*kernels, id, start + j), masked[t], unmasked[t],
                                          std::min(kBlockColumns, count - j), target + j);
        }
    });
}

}  // namespace

void bind_sums(pybind11::module_ &m) {
    bind(m, "affine_sums", &affine_sums, "gradient", "x", "mean", "rstd", "bounds", "out", "threads");
    bind(m, "masked_weighted_sum", &masked_weighted_sum, "left", "right", "bounds", "masked", "unmasked", "mask", "out",
         "out_row", "threads");
    bind(m, "weighted_sum_group", &weighted_sum_group, "lefts", "rights", "bounds", "weights", "outs", "begun", "threads");
    bind(m, "onehot_add", &onehot_add, "ids", "ids_stride", "right", "tokens", "masked", "unmasked", "mask", "out", "out_stride",
         "threads");
}

}  // namespace fastdp
