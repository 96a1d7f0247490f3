// Per-example clipping and noise: one pass for the norms, one that scales, noises and writes. And the gradient of the
// clip.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings.h"
#include "noise.h"

namespace fastdp {

namespace {

// Pieces of a row that are summed apart, so that one long row still occupies every thread. Their bounds do not depend
// on the number of threads, hence neither do the sums.
constexpr int64_t kPiece = 8192;

// out[r] = sum over row r of x * y, in float64.
void row_dots(const NoiseLanes &lanes, const char *x, const char *y, Dtype type, int64_t rows, int64_t length,
              double *out, int threads) {
    const int64_t pieces = std::max<int64_t>(1, (length + kPiece - 1) / kPiece);
    std::vector<double> partial(rows * pieces);
    const int64_t together = std::max<int64_t>(1, 8 * kPiece / std::max<int64_t>(1, std::min(length, kPiece)));
    share_out(rows * pieces, together, threads, [&](int64_t begin, int64_t end) {
        for (int64_t p = begin; p < end; ++p) {
            const int64_t start = p % pieces * kPiece;
            const int64_t offset = (p / pieces * length + start) * width(type);
            partial[p] = lanes.dot(x + offset, y + offset, type, std::min(kPiece, length - start));
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        out[r] = 0;
        for (int64_t p = 0; p < pieces; ++p) out[r] += partial[r * pieces + p];
    }
}

// The norm is summed in float64, exactly but for 2^-28 even of 2^24 lanes. The root of the factor, taken twice, and both
// products are rounded to float32, each by at most 2^-24. Less is taken than all of these together, so that no row is ever
// left longer than the bound.
constexpr double kShorter = 1.0 - 0x1p-21;

bool is_clipped(double norm, double bound) { return norm > bound * (1.0 - 0x1p-28); }

// The root of what a row is multiplied by: the factor itself may be below float32's range. A row that is not finite has no
// direction: it is removed, like an example of norm 0.
float root_factor(double norm, double bound) {
    if (!std::isfinite(norm)) return 0.f;
    return is_clipped(norm, bound) ? static_cast<float>(std::sqrt(bound / norm * kShorter)) : 1.f;
}

// How much of x is taken from the gradient g, given <g, x>: <g, x> / |x|^2 where x was clipped.
float pull_factor(double along, double norm, double bound) {
    return is_clipped(norm, bound) ? static_cast<float>(along / norm / norm) : 0.f;
}

// Calls body(row, first, count, offset in the tile) for the stretches of [i, i + n) that lie in one row.
template <typename F>
void by_row(int64_t i, int64_t n, int64_t length, const F &body) {
    for (int64_t done = 0; done < n;) {
        const int64_t row = (i + done) / length;
        const int64_t count = std::min(n - done, (row + 1) * length - (i + done));
        body(row, i + done, count, done);
        done += count;
    }
}

// Per-example clipping and noise.
void clip_noise(const char *from, char *to, double *norms, Dtype type, int64_t rows, int64_t length, double bound,
                double std, const Position &at, bool rounded, int threads) {
    const NoiseLanes &lanes = noise_lanes();
    row_dots(lanes, from, from, type, rows, length, norms, threads);
    std::vector<float> root(rows);
    for (int64_t r = 0; r < rows; ++r) {
        norms[r] = std::sqrt(norms[r]);
        root[r] = root_factor(norms[r], bound);
    }
    const int64_t n = rows * length;
    const Grid grid(std);
    share_out((n + kTile - 1) / kTile, kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kTileRoom];
        if (std == 0) std::fill(room, room + kTile, 0.f);
        float *z = room;
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t i = tile * kTile, count = std::min(kTile, n - i);
            if (std != 0) z = noise_tile(lanes, at, rounded, i, count, room);
            by_row(i, count, length, [&](int64_t row, int64_t first, int64_t some, int64_t o_z) {
                const int64_t offset = first * width(type);
                if (std != 0 && rounded) {
                    round_to_grid(lanes, at, grid, first, from + offset, type, root[row], z + o_z, some);
                    return lanes.from_float(z + o_z, to + offset, type, some);
                }
                lanes.scale_add(from + offset, to + offset, type, z + o_z, root[row], static_cast<float>(std), some);
            });
        }
    });
}

// With y = x min(1, C / |x|): dx = g where nothing was clipped, and C / |x| (g - x <g, x> / |x|^2) elsewhere.
void clip_backward(const char *g, const char *from, const double *norms, char *to, Dtype type, int64_t rows,
                   int64_t length, double bound, int threads) {
    const NoiseLanes &lanes = noise_lanes();
    std::vector<double> along(rows);
    row_dots(lanes, g, from, type, rows, length, along.data(), threads);
    std::vector<float> root(rows), pull(rows);
    for (int64_t r = 0; r < rows; ++r) {
        root[r] = root_factor(norms[r], bound);
        pull[r] = pull_factor(along[r], norms[r], bound);
    }
    const int64_t n = rows * length;
    share_out((n + kTile - 1) / kTile, 4 * kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        const int64_t i = begin * kTile, stop = std::min(end * kTile, n);
        by_row(i, stop - i, length, [&](int64_t row, int64_t first, int64_t count, int64_t) {
            const int64_t offset = first * width(type);
            lanes.pull_back(g + offset, from + offset, to + offset, type, root[row], pull[row], count);
        });
    });
}

}  // namespace

void bind_clip(pybind11::module_ &m) {
    bind(m, "clip_noise", &clip_noise, "x", "out", "norm", "dtype", "rows", "length", "bound", "std", "position", "rounded",
         "threads");
    bind(m, "clip_backward", &clip_backward, "grad", "x", "norm", "out", "dtype", "rows", "length", "bound", "threads");
}

}  // namespace fastdp
