// AdamW on a noised gradient, in one pass: the noise never reaches memory.
#include <algorithm>
#include <cmath>

#include "bindings.h"
#include "noise.h"

namespace fastdp {

namespace {

// Elements [first, first + n) of the matrix a b^T, whose rows are `width` long.
void outer(const float *a, const float *b, int64_t width, int64_t first, int64_t n, float *out) {
    int64_t row = first / width, column = first % width;
    for (int64_t done = 0; done < n; ++row, column = 0) {
        const int64_t count = std::min(width - column, n - done);
        for (int64_t k = 0; k < count; ++k) out[done + k] = a[row] * b[column + k];
        done += count;
    }
}

// Noise and AdamW in one pass, on n numbers; a and b are axes of the matrix that they are, or null. They begin at element
// `start`, a multiple of a block's, of the tensor that the position is of.
void adamw_noise_step(char *p, Dtype type, const float *g, float *m, float *v, int64_t n, uint64_t start,
                      const Position &at, bool rounded, double std, double divisor, double lr, double beta1, double beta2, double eps,
                      double weight_decay, int64_t step, const float *a, const float *b, int64_t row_width, int threads) {
    const NoiseLanes &lanes = noise_lanes();
    const bool noisy = std != 0;
    const Grid grid(std);
    AdamWStep s;
    s.std = rounded ? 0.f : static_cast<float>(std);  // a rounded sum holds its noise
    s.inverse_divisor = static_cast<float>(1.0 / divisor);
    s.keep = static_cast<float>(1.0 - lr * weight_decay);
    s.step_size = static_cast<float>(lr / (1.0 - std::pow(beta1, static_cast<double>(step))));
    s.beta2 = static_cast<float>(beta2);
    s.rest1 = static_cast<float>(1.0 - beta1);
    s.rest2 = static_cast<float>(1.0 - beta2);
    s.inverse_correction2 = static_cast<float>(1.0 / (1.0 - std::pow(beta2, static_cast<double>(step))));
    s.eps = static_cast<float>(eps);
    share_out((n + kTile - 1) / kTile, kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kTileRoom];
        alignas(64) float axes[kTile];
        if (!noisy) std::fill(room, room + kTile, 0.f);
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t i = tile * kTile, count = std::min(kTile, n - i);
            if (noisy) {
                const auto bytes = [i](const float *x) { return reinterpret_cast<const char *>(x + i); };
                const char *const ahead[4] = {p + i * width(type), bytes(g), bytes(m), bytes(v)};
                const int64_t groups = (count + kGroup * kBlockWords - 1) / (kGroup * kBlockWords);
                lanes.normals_ahead(at, static_cast<uint32_t>((start + i) / kBlockWords), groups * kGroup, room,
                                    rounded, ahead);
            }
            const float *sum = g + i;
            if (noisy && rounded) {
                round_to_grid(lanes, at, grid, start + i, sum, Dtype::float32, 1.f, room, count);
                sum = room;
            }
            if (a) outer(a, b, row_width, i, count, axes);
            lanes.adamw(p + i * width(type), type, sum, m + i, v + i, room, a ? axes : nullptr, s, count);
        }
    });
}

}  // namespace

void bind_adamw(pybind11::module_ &m) {
    bind(m, "adamw_noise_step", &adamw_noise_step, "param", "dtype", "grad", "mean", "square", "n", "start", "position", "rounded",
         "std", "divisor", "lr", "beta1", "beta2", "eps", "weight_decay", "step", "rows", "columns", "width", "threads");
}

}  // namespace fastdp
