// Gaussian noise at a position, and the loops over memory that consume it: one table of functions per instruction set.
#pragma once
#include <algorithm>
#include <cstdint>
#include <string>

#include "chacha.h"
#include "cpu.h"
#include "exact_normal.h"
#include "team.h"

namespace fastdp {

enum class Dtype { float32 = 0, bfloat16 = 1, float16 = 2 };

// Blocks are made this many at a time by every path, so a buffer of kGroup * 16 words always holds whole vectors.
constexpr int64_t kGroup = 16;
constexpr int64_t kBlockWords = 16;
// Elements worked on at once: the noise of a tile stays in the first-level cache between being made and being used.
constexpr int64_t kTile = 4 * kGroup * kBlockWords;

// Tiles taken at once by a thread, about 17 us of noise.
constexpr int64_t kTilesAnItem = 16;

struct AdamWStep {
    float std;             // of the noise added to the gradient sum
    float inverse_divisor;
    float keep;            // 1 - lr * weight_decay
    float step_size;       // lr / (1 - beta1^t)
    float beta2, rest1, rest2;  // rest = 1 - beta, from float64: in float32 1 - .999f is off by 5e-5 of itself
    float inverse_correction2;  // 1 / (1 - beta2^t)
    float eps;
};

// The grid that noised sums are rounded to: `spacing` is the power of two with 16 spacings <= std < 32 spacings, std
// being rounded up to a float32.
struct Grid {
    float ratio;  // std / spacing
    float spacing;
    explicit Grid(double std);
};

struct NoiseLanes {
    // Words of blocks [first, first + blocks); blocks is a multiple of kGroup.
    void (*words)(const Position &at, uint32_t first, int64_t blocks, uint32_t *out);
    // Their normals, in float32; with `marked`, NaN where 64 bits of the uniform do not tell them to float32's accuracy.
    void (*normals)(const Position &at, uint32_t first, int64_t blocks, float *out, bool marked);
    // The same, while 64 bytes a block of four arrays are fetched into the cache.
    void (*normals_ahead)(const Position &at, uint32_t first, int64_t blocks, float *out, bool marked,
                          const char *const ahead[4]);
    // z[i] = root^2 * x[i] + std * z[i] rounded to the grid, for marked normals z; n <= kTile. Writes to `open` the
    // indices whose rounding float32 does not decide, of which z[i] is left wrong, and returns how many they are.
    int64_t (*to_grid)(const void *x, Dtype dtype, float root, float *z, const Grid &grid, int64_t n, int32_t *open);
    // x[i] = root^2 * x[i] + std * z[i], n <= kTile, any dtype; out may be x. A scale of up to 2^-252 has a root in float32.
    void (*scale_add)(const void *x, void *out, Dtype dtype, const float *z, float root, float std, int64_t n);
    // With `axes`, the noised mean is multiplied by axes[i].
    void (*adamw)(void *param, Dtype dtype, const float *grad, float *mean, float *square, const float *z,
                  const float *axes, const AdamWStep &step, int64_t n);
    // sum of x[i] * y[i] in float64; y may be x.
    double (*dot)(const void *x, const void *y, Dtype dtype, int64_t n);
    void (*to_float)(const void *x, Dtype dtype, float *out, int64_t n);
    void (*from_float)(const float *x, void *out, Dtype dtype, int64_t n);
    // out[i] = root^2 * (g[i] - pull * x[i]), all of one dtype.
    void (*pull_back)(const void *g, const void *x, void *out, Dtype dtype, float root, float pull, int64_t n);
};

namespace portable { extern const NoiseLanes noise_lanes; }
#if defined(__x86_64__) && defined(__GNUC__)
namespace avx2 { extern const NoiseLanes noise_lanes; }
namespace avx512 { extern const NoiseLanes noise_lanes; }
#endif

// The table of this processor, or of a named lower instruction set (tests compare them).
const NoiseLanes &noise_lanes();
const NoiseLanes &noise_lanes(const std::string &isa);

// The radius sqrt(-2 ln u) of pair k of a block whose radius word has 16 zero top bits: u = (word 2^32 + second + .5)
// / 2^64, `second` being the same word of the block with the domain flag.
float wide_radius(const Position &at, uint32_t block, int k, uint32_t word);

// Writes the noise of elements [first, first + n) to z, and returns where they begin: `first` need not begin a block.
// n <= kTile, and z has room for kTileRoom floats.
float *noise_tile(const NoiseLanes &lanes, const Position &at, bool marked, uint64_t first, int64_t n, float *z);
constexpr int64_t kTileRoom = kTile + 2 * kGroup * kBlockWords;

// z[i] = root^2 * x[i] + std * z[i] rounded to the grid, exactly, for the marked normals z of elements [first, first +
// n).
void round_to_grid(const NoiseLanes &lanes, const Position &at, const Grid &grid, uint64_t first, const void *x,
                   Dtype dtype, float root, float *z, int64_t n);

// Calls body(begin, end) over [0, n) in items of `piece`, on at most `threads` threads, each of which has at least two
// items to start for. Where the pieces are cut must not matter to the result.
template <typename F>
void share_out(int64_t n, int64_t piece, int threads, const F &body) {
    const int64_t items = (n + piece - 1) / piece;
    team_for(items, static_cast<int>(std::clamp<int64_t>(items / 2, 1, std::max(1, threads))),
             [&](int64_t item) { body(item * piece, std::min(n, (item + 1) * piece)); });
}

inline int64_t width(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

}  // namespace fastdp
