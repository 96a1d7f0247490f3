// An embedding's gradients: their per-unit norms, where rows of R with the same id within a unit add up before they are
// measured, and their weighted sum; both with or without a mask over the table.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "bindings.h"
#include "factor.h"
#include "outer_block.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kColumns = 512;  // columns summed at a time: two rows of them stay in a first-level cache
constexpr int64_t kWords = kColumns / kBlockColumns;

// A mask over a table, as bits: each row padded to words of 64.
struct MaskRows {
    const uint64_t *bits;
    int64_t words_a_row;

    MaskRows(uintptr_t address, int64_t columns)
        : bits(reinterpret_cast<const uint64_t *>(address)), words_a_row((columns + kBlockColumns - 1) / kBlockColumns) {}

    uint64_t word(int64_t row, int64_t column) const { return bits[row * words_a_row + column / kBlockColumns]; }
};

void onehot_norms(uintptr_t ids_address, int64_t ids_stride, const FactorTuple &right_tuple,
                  const std::vector<int64_t> &bounds, int measure_number, uintptr_t mask_address, uintptr_t out_address,
                  int threads) {
    const int64_t *ids = reinterpret_cast<const int64_t *>(ids_address);
    const Factor right = factor_of(right_tuple);
    const auto measure = static_cast<Measure>(measure_number);
    const MaskRows mask(mask_address, right.width);
    const int64_t units = static_cast<int64_t>(bounds.size()) - 1, panels = (right.width + kColumns - 1) / kColumns;
    float *out = reinterpret_cast<float *>(out_address);
    pybind11::gil_scoped_release release;

    const BlockKernels &kernels = block_kernels();
    std::vector<int64_t> order(bounds.back());
    std::iota(order.begin(), order.end(), 0);
    team_for(units, threads, [&](int64_t unit) {
        std::sort(order.begin() + bounds[unit], order.begin() + bounds[unit + 1], [&](int64_t s, int64_t t) {
            const int64_t a = ids[s * ids_stride], b = ids[t * ids_stride];
            return a != b ? a < b : s < t;
        });
    });
    std::vector<double> parts(units * panels * 2);
    team_for(units * panels, threads, [&](int64_t item) {
        const int64_t unit = item / panels, start = item % panels * kColumns;
        const int64_t count = std::min(kColumns, right.width - start), last = bounds[unit + 1];
        float sum[kColumns], row[kColumns];
        double total[2] = {0, 0};
        for (int64_t i = bounds[unit]; i < last;) {
            const int64_t id = ids[order[i] * ids_stride];
            read_row(right, order[i], start, count, sum);
            for (++i; i < last && ids[order[i] * ids_stride] == id; ++i) {
                read_row(right, order[i], start, count, row);
                for (int64_t j = 0; j < count; ++j) sum[j] += row[j];
            }
            float sums[2] = {0, 0};
            for (int64_t j = 0; j < count; j += kBlockColumns)
                add_measure(kernels, measure, sum + j, first_bits(count - j),
                            measure == Measure::masked_square ? mask.word(id, start + j) : 0, sums);
            total[0] += sums[0];
            total[1] += sums[1];
        }
        parts[item * 2] = total[0];
        parts[item * 2 + 1] = total[1];
    });
    for (int64_t part = 0; part < (measure == Measure::masked_square ? 2 : 1); ++part) {
        for (int64_t unit = 0; unit < units; ++unit) {
            double total = 0;
            for (int64_t panel = 0; panel < panels; ++panel) total += parts[(unit * panels + panel) * 2 + part];
            out[part * units + unit] = static_cast<float>(total);
        }
    }
}

// out[ids[t]] += weights[t] * R[t]. Each thread owns columns, so tokens are added in their order whatever the threads.
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

void bind_onehot_norms(pybind11::module_ &m) {
    namespace py = pybind11;
    m.def("onehot_norms", &onehot_norms, py::arg("ids"), py::arg("ids_stride"), py::arg("right"), py::arg("bounds"),
          py::arg("measure"), py::arg("mask"), py::arg("out"), py::arg("threads"));
    m.def("onehot_add", &onehot_add, py::arg("ids"), py::arg("ids_stride"), py::arg("right"), py::arg("tokens"),
          py::arg("weights"), py::arg("out"), py::arg("out_stride"), py::arg("threads"));
    m.def("onehot_masked_add", &onehot_masked_add, py::arg("ids"), py::arg("ids_stride"), py::arg("right"),
          py::arg("tokens"), py::arg("masked"), py::arg("unmasked"), py::arg("mask"), py::arg("out"),
          py::arg("out_stride"), py::arg("threads"));
}

}  // namespace fastdp
