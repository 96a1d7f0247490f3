// An embedding's gradients: their per-unit squared norms, where rows of R with the same id within a unit add up before they
// are squared, and their weighted sum.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "bindings.h"
#include "factor.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kColumns = 512;  // columns summed at a time: two rows of them stay in a first-level cache

float sum_squares(const float *x, int64_t count) {
    float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int lane = 0; lane < 16; ++lane) lanes[lane] += x[i + lane] * x[i + lane];
    for (; i < count; ++i) lanes[0] += x[i] * x[i];
    return std::accumulate(lanes, lanes + 16, 0.0f);
}

void onehot_sqnorm(uintptr_t ids_address, int64_t ids_stride, const FactorTuple &right_tuple,
                   const std::vector<int64_t> &bounds, uintptr_t out_address, int threads) {
    const int64_t *ids = reinterpret_cast<const int64_t *>(ids_address);
    const Factor right = factor_of(right_tuple);
    const int64_t units = static_cast<int64_t>(bounds.size()) - 1, panels = (right.width + kColumns - 1) / kColumns;
    float *out = reinterpret_cast<float *>(out_address);
    pybind11::gil_scoped_release release;

    std::vector<int64_t> order(bounds.back());
    std::iota(order.begin(), order.end(), 0);
    team_for(units, threads, [&](int64_t unit) {
        std::sort(order.begin() + bounds[unit], order.begin() + bounds[unit + 1], [&](int64_t s, int64_t t) {
            const int64_t a = ids[s * ids_stride], b = ids[t * ids_stride];
            return a != b ? a < b : s < t;
        });
    });
    std::vector<double> parts(units * panels);
    team_for(units * panels, threads, [&](int64_t item) {
        const int64_t unit = item / panels, start = item % panels * kColumns;
        const int64_t count = std::min(kColumns, right.width - start), last = bounds[unit + 1];
        float sum[kColumns], row[kColumns];
        double total = 0;
        for (int64_t i = bounds[unit]; i < last;) {
            const int64_t id = ids[order[i] * ids_stride];
            read_row(right, order[i], start, count, sum);
            for (++i; i < last && ids[order[i] * ids_stride] == id; ++i) {
                read_row(right, order[i], start, count, row);
                for (int64_t j = 0; j < count; ++j) sum[j] += row[j];
            }
            total += sum_squares(sum, count);
        }
        parts[item] = total;
    });
    for (int64_t unit = 0; unit < units; ++unit)
        out[unit] = static_cast<float>(std::accumulate(parts.begin() + unit * panels, parts.begin() + (unit + 1) * panels, 0.0));
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

}  // namespace

void bind_onehot_norms(pybind11::module_ &m) {
    namespace py = pybind11;
    m.def("onehot_sqnorm", &onehot_sqnorm, py::arg("ids"), py::arg("ids_stride"), py::arg("right"), py::arg("bounds"),
          py::arg("out"), py::arg("threads"));
    m.def("onehot_add", &onehot_add, py::arg("ids"), py::arg("ids_stride"), py::arg("right"), py::arg("tokens"),
          py::arg("weights"), py::arg("out"), py::arg("out_stride"), py::arg("threads"));
}

}  // namespace fastdp
