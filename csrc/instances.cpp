// Instantiated per-unit gradients, rows [units][size] of floats: their norms and weighted sums, in one reading.
#include <algorithm>
#include <vector>

#include "bindings.h"
#include "block.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kChunk = 1 << 13;         // entries of an item: as floats half a first-level cache
constexpr int64_t kSumChunk = 1 << 11;      // entries of a sum made at a time, which stay in the cache
constexpr int64_t kRowsAtOnce = 8;          // rows read side by side, as many as are prefetched well
constexpr int64_t kEntriesAThread = 1 << 15;  // fewer are done before another thread has woken up

int threads_for(int64_t entries, int threads) {
    return static_cast<int>(std::clamp<int64_t>(entries / kEntriesAThread, 1, threads));
}

// out[which][unit], float32, as direct_norms in norms_direct.cpp, of gradients that lie in memory: contiguous float32
// [units][size]; `mask` holds a byte for each entry of one of them.
void instance_norms(const float *rows, int64_t units, int64_t size, Measure measure, const uint8_t *mask, float *out,
                    int threads) {
    const int64_t chunks = std::max<int64_t>(1, (size + kChunk - 1) / kChunk);
    const BlockKernels &kernels = block_kernels();
    const int team = threads_for(units * size, threads);
    const std::vector<uint64_t> words = MaskRows{mask, size}.words(kernels, 1, team);
    std::vector<double> parts(units * chunks * 2);
    team_for(units * chunks, team, [&](int64_t item) {
        const int64_t unit = item / chunks, start = item % chunks * kChunk, end = std::min(size, start + kChunk);
        float sums[2] = {0, 0};
        const float *row = rows + unit * size;
        if (measure != Measure::masked_square)
            sums[0] = (measure == Measure::square ? kernels.sum_squares : kernels.sum_sizes)(row + start, end - start);
        else
            for (int64_t i = start; i < end; i += kBlockColumns)
                add_measure(kernels, measure, row + i, first_bits(end - i), words[i / kBlockColumns], sums);
        parts[item * 2] = sums[0];
        parts[item * 2 + 1] = sums[1];
    });
    sum_parts(parts, measure, units, chunks, out);
}

// out[i] = sum over units of weight * row[i], in the order of the units. A weight of 0 selects the row out.
void instance_sum(const float *rows, int64_t units, int64_t size, const float *weights, float *out, int threads) {
    const BlockKernels &kernels = block_kernels();
    std::vector<const float *> kept;
    std::vector<float> factors;
    for (int64_t unit = 0; unit < units; ++unit) {
        if (weights[unit] == 0) continue;
        kept.push_back(rows + unit * size);
        factors.push_back(weights[unit]);
    }
    const int64_t n = kept.size();
    if (n == 0) std::fill(out, out + size, 0.0f);
    team_for((size + kSumChunk - 1) / kSumChunk, threads_for(n * size, threads), [&](int64_t item) {
        const int64_t start = item * kSumChunk, count = std::min(kSumChunk, size - start);
        const float *at[kRowsAtOnce];
        for (int64_t first = 0; first < n; first += kRowsAtOnce) {
            const int64_t some = std::min(kRowsAtOnce, n - first);
            for (int64_t k = 0; k < some; ++k) at[k] = kept[first + k] + start;
            kernels.add_rows(at, factors.data() + first, some, count, first > 0, out + start);
        }
    });
}

// out[i] = sum over units of weight * row[i]: the unit's masked weight where `mask` is set, else its unmasked one. A weight of
// 0 selects the row out.
void instance_masked_sum(const float *rows, int64_t units, int64_t size, const float *masked, const float *unmasked,
                         const uint8_t *mask, float *out, int threads) {
    const BlockKernels &kernels = block_kernels();
    const int team = threads_for(units * size, threads);
    const std::vector<uint64_t> words = MaskRows{mask, size}.words(kernels, 1, team);
    team_for((size + kChunk - 1) / kChunk, team, [&](int64_t item) {
        const int64_t start = item * kChunk, end = std::min(size, start + kChunk);
        std::fill(out + start, out + end, 0.0f);
        for (int64_t unit = 0; unit < units; ++unit) {
            if (masked[unit] == 0 && unmasked[unit] == 0) continue;
            const float *row = rows + unit * size;
            for (int64_t i = start; i < end; i += kBlockColumns)
                kernels.add_weighted(row + i, words[i / kBlockColumns], masked[unit], unmasked[unit],
                                     std::min(kBlockColumns, end - i), out + i);
        }
    });
}

}  // namespace

void bind_instances(pybind11::module_ &m) {
    bind(m, "instance_norms", &instance_norms, "instances", "units", "size", "measure", "mask", "out", "threads");
    bind(m, "instance_sum", &instance_sum, "instances", "units", "size", "weights", "out", "threads");
    bind(m, "instance_masked_sum", &instance_masked_sum, "instances", "units", "size", "masked", "unmasked", "mask", "out",
         "threads");
}

}  // namespace fastdp
