// Norms that look at each entry of a unit's gradient L^T R: squared, absolute, and squared under a mask.
//
// A band of 96 x 64 entries is computed, reduced and forgotten; the largest scratch is a unit's panel of columns. A BLAS
// would write each product out for a second pass to read back.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "cpu.h"
#include "factor.h"
#include "outer_block.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kChunkTokens = 256;  // tokens at a time: the rows of L they touch stay within reach of address translation

struct Panels {
    std::vector<float> left, right;
};

// Columns [start, start + count) of tokens [first, last), copied to rows of `pitch` floats, zero past `count`.
Rows packed(const Factor &factor, int64_t first, int64_t last, int64_t start, int64_t count, int64_t pitch,
            std::vector<float> &out) {
    out.resize(std::max<int64_t>(out.size(), (last - first) * pitch));
    for (int64_t t = first; t < last; ++t) {
        float *row = out.data() + (t - first) * pitch;
        read_row(factor, t, start, count, row);
        std::fill(row + count, row + pitch, 0.0f);
    }
    return {out.data(), pitch};
}

// A panel of R: where it lies if few rows of L will meet it, else packed, which spares the address translation.
Rows right_panel(const Factor &right, int64_t first, int64_t last, int64_t start, int64_t count, int64_t m, Panels &panels) {
    if (right.plain() && count == kBlockColumns && m <= kChunkRows) return {right.row(first) + start, right.row_stride};
    return packed(right, first, last, start, count, kBlockColumns, panels.right);
}

// band[rows][64] = the gradient's rows from `start` against a panel of R, over tokens [first, last). Entries of L are read
// once a panel, so plain floats stay where they are.
void compute_band(const BlockKernels &kernels, const Factor &left, Rows right, int64_t first, int64_t last, int64_t start,
                  int64_t rows, int64_t columns, Panels &panels, float *band) {
    // As few blocks as possible, as equal as possible.
    const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows, step = (rows + blocks - 1) / blocks;
    for (int64_t token = first; token < last; token += kChunkTokens) {
        const int64_t end = std::min(last, token + kChunkTokens);
        const Rows l = left.plain() ? Rows{left.row(token) + start, left.row_stride}
                                    : packed(left, token, end, start, rows, kChunkRows, panels.left);
        const Rows r{right.data + (token - first) * right.pitch, right.pitch};
        for (int64_t row = 0; row < rows; row += step)
            kernels.outer({l.data + row, l.pitch}, r, end - token, std::min(step, rows - row), columns,
                          band + row * kBlockColumns, token > first);
    }
}

void direct_norms(const FactorTuple &left_tuple, const FactorTuple &right_tuple, const std::vector<int64_t> &bounds,
                  int measure_number, uintptr_t mask_address, uintptr_t out_address, int threads) {
    const Factor left = factor_of(left_tuple), right = factor_of(right_tuple);
    const auto measure = static_cast<Measure>(measure_number);
    const int64_t units = static_cast<int64_t>(bounds.size()) - 1, m = left.width, n = right.width;
    const int64_t panels = (n + kBlockColumns - 1) / kBlockColumns;
    const uint64_t *mask = reinterpret_cast<const uint64_t *>(mask_address);
    float *out = reinterpret_cast<float *>(out_address);
    pybind11::gil_scoped_release release;

    const BlockKernels &kernels = block_kernels();
    std::vector<double> partial(units * panels * 2);
    team_for(units * panels, threads, [&](int64_t item) {
        static thread_local Panels panels_of_thread;
        const int64_t unit = item / panels, panel = item % panels;
        const int64_t first = bounds[unit], last = bounds[unit + 1], tokens = last - first;
        if (tokens == 0) return;
        const int64_t columns = std::min(kBlockColumns, n - panel * kBlockColumns);
        const uint64_t valid = first_bits(columns);
        const Rows r = right_panel(right, first, last, panel * kBlockColumns, columns, m, panels_of_thread);
        alignas(64) float band[kChunkRows * kBlockColumns];
        for (int64_t start = 0; start < m; start += kChunkRows) {
            const int64_t rows = std::min(kChunkRows, m - start);
            compute_band(kernels, left, r, first, last, start, rows, columns, panels_of_thread, band);
            float sums[2] = {0, 0};
            for (int64_t row = 0; row < rows; ++row)
                add_measure(kernels, measure, band + row * kBlockColumns, valid,
                            measure == Measure::masked_square ? mask[(start + row) * panels + panel] : 0, sums);
            partial[item * 2] += sums[0];
            partial[item * 2 + 1] += sums[1];
        }
    });
    const int64_t parts = measure == Measure::masked_square ? 2 : 1;
    for (int64_t part = 0; part < parts; ++part) {
        for (int64_t unit = 0; unit < units; ++unit) {
            double total = 0;
            for (int64_t panel = 0; panel < panels; ++panel) total += partial[(unit * panels + panel) * 2 + part];
            out[part * units + unit] = static_cast<float>(total);
        }
    }
}

// The sum over tokens of w_t L_t R_t^T added to `out`, with one weight for masked and another for unmasked entries. Runs of
// tokens with the same weights (a unit's) are multiplied once and scaled under the mask as they are added.
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

}  // namespace

void bind_direct_norms(pybind11::module_ &m) {
    namespace py = pybind11;
    m.def("direct_norms", &direct_norms, py::arg("left"), py::arg("right"), py::arg("bounds"), py::arg("measure"),
          py::arg("mask"), py::arg("out"), py::arg("threads"));
    m.def("masked_weighted_sum", &masked_weighted_sum, py::arg("left"), py::arg("right"), py::arg("bounds"),
          py::arg("masked"), py::arg("unmasked"), py::arg("mask"), py::arg("out"), py::arg("out_row"),
          py::arg("threads"));
}

}  // namespace fastdp
