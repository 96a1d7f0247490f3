// Norms of an embedding's gradients, with or without a mask over the table: rows of R with the same id within a unit add
// up before they are measured.
#include <algorithm>
#include <numeric>
#include <vector>

#include "bindings.h"
#include "block.h"
#include "factor.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kColumns = 512;  // columns summed at a time: two rows of them stay in a first-level cache

// out[which][unit], float32, as direct_norms in norms_direct.cpp, of an embedding: `ids` int64, `ids_stride` apart, all of
// them rows of the mask if there is one; right [tokens, n]. Rows of equal ids are added in the order of their tokens.
void onehot_norms(const int64_t *ids, int64_t ids_stride, const Factor &right, const std::vector<int64_t> &bounds,
                  Measure measure, const uint8_t *bytes, float *out, int threads) {
    const MaskRows mask{bytes, right.width};
    const int64_t units = static_cast<int64_t>(bounds.size()) - 1, panels = (right.width + kColumns - 1) / kColumns;
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
                            measure == Measure::masked_square ? mask.word(kernels, id, start + j) : 0, sums);
            total[0] += sums[0];
            total[1] += sums[1];
        }
        parts[item * 2] = total[0];
        parts[item * 2 + 1] = total[1];
    });
    sum_parts(parts, measure, units, panels, out);
}

}  // namespace

void bind_norms_onehot(pybind11::module_ &m) {
    bind(m, "onehot_norms", &onehot_norms, "ids", "ids_stride", "right", "bounds", "measure", "mask", "out", "threads");
}

}  // namespace fastdp
