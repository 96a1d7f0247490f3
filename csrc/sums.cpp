// Sums of token gradients: weighted ones under a mask, from bands that are never written whole, rows of R into a table, and
// a layer norm's by unit.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
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
__attribute__((target("avx2,fma"))) FASTDP_AFFINE_ROW(affine_row_avx2)
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl"))) FASTDP_AFFINE_ROW(affine_row_avx512)
#endif

AffineRow affine_row() {
#if defined(__x86_64__)
    if (isa() == Isa::avx512) return affine_row_avx512;
    if (isa() == Isa::avx2) return affine_row_avx2;
#endif
    return affine_row_portable;
}

// Sums over each unit's tokens of G (X - mean) rstd, then of G: out float32 [2, units, width].
void affine_sums(const FactorTuple &gradient_tuple, const FactorTuple &x_tuple, uintptr_t mean_address,
                 uintptr_t rstd_address, const std::vector<int64_t> &bounds, uintptr_t out_address, int threads) {
    const Factor gradient = factor_of(gradient_tuple), x = factor_of(x_tuple);
    const float *mean = reinterpret_cast<const float *>(mean_address);
    const float *rstd = reinterpret_cast<const float *>(rstd_address);
    float *out = reinterpret_cast<float *>(out_address);
    const int64_t n = x.width, units = static_cast<int64_t>(bounds.size()) - 1, panels = (n + kColumns - 1) / kColumns;
    pybind11::gil_scoped_release release;

    const AffineRow add = affine_row();
    team_for(units * panels, threads, [&](int64_t item) {
        const int64_t unit = item / panels, start = item % panels * kColumns, count = std::min(kColumns, n - start);
        float *totals[2] = {out + unit * n + start, out + (units + unit) * n + start};
        for (float *total : totals) std::fill(total, total + count, 0.0f);
        alignas(64) float sums[2][kColumns], rows[2][kColumns];
        for (int64_t first = bounds[unit]; first < bounds[unit + 1]; first += kTokens) {
            for (float *sum : sums) std::fill(sum, sum + count, 0.0f);
            for (int64_t t = first; t < std::min(bounds[unit + 1], first + kTokens); ++t) {
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
// rows `out_row` apart, columns next to each other; `mask` bits [m, n].
void masked_weighted_sum(const FactorTuple &left_tuple, const FactorTuple &right_tuple, const std::vector<int64_t> &bounds,
                  const std::vector<float> &masked, const std::vector<float> &unmasked, uintptr_t mask_address,
                  uintptr_t out_address, int64_t out_row, int threads) {
    const Factor left = factor_of(left_tuple), right = factor_of(right_tuple);
    const int64_t m = left.width, n = right.width;
    const int64_t panels = (n + kBlockColumns - 1) / kBlockColumns, chunks = (m + kChunkRows - 1) / kChunkRows;
    const uint64_t *mask = reinterpret_cast<const uint64_t *>(mask_address);
    float *out = reinterpret_cast<float *>(out_address);
    pybind11::gil_scoped_release release;

    const BlockKernels &kernels = block_kernels();
    team_for(panels * chunks, threads, [&](int64_t item) {
        static thread_local Panels panels_of_thread;
        const int64_t panel = item % panels, start = item / panels * kChunkRows;
        const int64_t columns = std::min(kBlockColumns, n - panel * kBlockColumns), rows = std::min(kChunkRows, m - start);
        alignas(64) float band[kChunkRows * kBlockColumns];
        for (size_t run = 0; run < masked.size(); ++run) {
            const int64_t first = bounds[run], last = bounds[run + 1];
            if (first == last || (masked[run] == 0 && unmasked[run] == 0)) continue;
            const Rows r = right_panel(right, first, last, panel * kBlockColumns, columns, rows, panels_of_thread);
            compute_band(kernels, left, r, first, last, start, rows, columns, panels_of_thread, band);
            for (int64_t row = 0; row < rows; ++row)
                kernels.add_weighted(band + row * kBlockColumns, mask[(start + row) * panels + panel], masked[run],
                                     unmasked[run], columns, out + (start + row) * out_row + panel * kBlockColumns);
        }
    });
}

// out[ids[t]] += weights[t] * R[t] for t < tokens: `out` float32, rows `out_stride` apart and columns next to each other;
// `weights` float32, contiguous; tokens of weight 0 are not read. Each thread owns columns, so tokens are added in their order whatever the threads.
void onehot_add(uintptr_t ids_address, int64_t ids_stride, const FactorTuple &right_tuple, int64_t tokens,
                uintptr_t weights_address, uintptr_t out_address, int64_t out_stride, int threads) {
    const int64_t *ids = reinterpret_cast<const int64_t *>(ids_address);
    const float *weights = reinterpret_cast<const float *>(weights_address);
    float *out = reinterpret_cast<float *>(out_address);
    const Factor right = factor_of(right_tuple);
    const int64_t columns = std::clamp<int64_t>(right.width / std::max(1, threads) / 16 * 16, 16, kColumns);
    pybind11::gil_scoped_release release;

    team_for((right.width + columns - 1) / columns, threads, [&](int64_t panel) {
        const int64_t start = panel * columns, count = std::min(columns, right.width - start);
        float row[kColumns];
        for (int64_t t = 0; t < tokens; ++t) {
            const float weight = weights[t];
            if (weight == 0) continue;
            const float *from = right.plain() ? right.row(t) + start : row;
            if (from == row) read_row(right, t, start, count, row);
            float *target = out + ids[t * ids_stride] * out_stride + start;
            for (int64_t j = 0; j < count; ++j) target[j] += weight * from[j];
        }
    });
}

// The same with one weight for masked and another for unmasked entries of the table.
void onehot_masked_add(uintptr_t ids_address, int64_t ids_stride, const FactorTuple &right_tuple, int64_t tokens,
                       uintptr_t masked_address, uintptr_t unmasked_address, uintptr_t mask_address,
                       uintptr_t out_address, int64_t out_stride, int threads) {
    const int64_t *ids = reinterpret_cast<const int64_t *>(ids_address);
    const float *masked = reinterpret_cast<const float *>(masked_address);
    const float *unmasked = reinterpret_cast<const float *>(unmasked_address);
    float *out = reinterpret_cast<float *>(out_address);
    const Factor right = factor_of(right_tuple);
    const MaskRows mask(mask_address, right.width);
    const int64_t words = std::clamp<int64_t>(mask.words_a_row / std::max(1, threads), 1, kWords);
    pybind11::gil_scoped_release release;

    const BlockKernels &kernels = block_kernels();
    team_for((mask.words_a_row + words - 1) / words, threads, [&](int64_t panel) {
        const int64_t start = panel * words * kBlockColumns;
        const int64_t count = std::min(words * kBlockColumns, right.width - start);
        float row[kColumns];
        for (int64_t t = 0; t < tokens; ++t) {
            if (masked[t] == 0 && unmasked[t] == 0) continue;
            const float *from = right.plain() ? right.row(t) + start : row;
            if (from == row) read_row(right, t, start, count, row);
            const int64_t id = ids[t * ids_stride];
            float *target = out + id * out_stride + start;
            for (int64_t j = 0; j < count; j += kBlockColumns)
                kernels.add_weighted(from + j, mask.word(id, start + j), masked[t], unmasked[t],
                                     std::min(kBlockColumns, count - j), target + j);
        }
    });
}

}  // namespace

void bind_sums(pybind11::module_ &m) {
    namespace py = pybind11;
    m.def("affine_sums", &affine_sums, py::arg("gradient"), py::arg("x"), py::arg("mean"), py::arg("rstd"),
          py::arg("bounds"), py::arg("out"), py::arg("threads"));
    m.def("masked_weighted_sum", &masked_weighted_sum, py::arg("left"), py::arg("right"), py::arg("bounds"),
          py::arg("masked"), py::arg("unmasked"), py::arg("mask"), py::arg("out"), py::arg("out_row"),
          py::arg("threads"));
    m.def("onehot_add", &onehot_add, py::arg("ids"), py::arg("ids_stride"), py::arg("right"), py::arg("tokens"),
          py::arg("weights"), py::arg("out"), py::arg("out_stride"), py::arg("threads"));
    m.def("onehot_masked_add", &onehot_masked_add, py::arg("ids"), py::arg("ids_stride"), py::arg("right"),
          py::arg("tokens"), py::arg("masked"), py::arg("unmasked"), py::arg("mask"), py::arg("out"),
          py::arg("out_stride"), py::arg("threads"));
}

}  // namespace fastdp
