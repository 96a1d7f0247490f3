// Choice of the instruction set, the rare wide radius, and add_noise: x + std N(0, 1) in one pass over memory.
#include "noise.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bindings.h"

namespace fastdp {

const NoiseLanes &noise_lanes() {
#if defined(__x86_64__) && defined(__GNUC__)
    if (isa() == Isa::avx512) return avx512::noise_lanes;
    if (isa() == Isa::avx2) return avx2::noise_lanes;
#endif
    return portable::noise_lanes;
}

const NoiseLanes &noise_lanes(const std::string &name) {
    if (name.empty()) return noise_lanes();
    if (name == "portable") return portable::noise_lanes;
#if defined(__x86_64__) && defined(__GNUC__)
    if (name == "avx2" && isa() >= Isa::avx2) return avx2::noise_lanes;
    if (name == "avx512" && isa() >= Isa::avx512) return avx512::noise_lanes;
#endif
    throw std::invalid_argument("instruction set '" + name + "' is unknown or not available here");
}

float wide_radius(const Position &at, uint32_t block, int k, uint32_t word) {
    Position second = at;
    second.tensor |= kDomainFlag;
    uint32_t out[16];
    chacha_block(second, block, out);
    const double u = (std::ldexp(static_cast<double>(word), 32) + out[k] + 0.5) * 0x1p-64;
    return static_cast<float>(std::sqrt(-2.0 * std::log(u)));
}

Grid::Grid(double std) {
    float size = static_cast<float>(std);
    if (size < std) size = std::nextafter(size, std::numeric_limits<float>::infinity());
    int exponent;
    ratio = std::ldexp(std::frexp(size, &exponent), 5);
    spacing = std::ldexp(1.f, exponent - 5);
}

float *noise_tile(const NoiseLanes &lanes, const Position &at, bool marked, uint64_t first, int64_t n, float *z) {
    const uint64_t block = first / kBlockWords;
    const int64_t skip = static_cast<int64_t>(first % kBlockWords);
    const int64_t blocks = (skip + n + kBlockWords - 1) / kBlockWords;
    lanes.normals(at, static_cast<uint32_t>(block), (blocks + kGroup - 1) / kGroup * kGroup, z, marked);
    return z + skip;
}

void round_to_grid(const NoiseLanes &lanes, const Position &at, const Grid &grid, uint64_t first, const void *x,
                   Dtype dtype, float root, float *z, int64_t n) {
    int32_t open[kTile];
    const int64_t found = lanes.to_grid(x, dtype, root, z, grid, n, open);
    for (int64_t j = 0; j < found; ++j) {
        const int64_t i = open[j];
        float s;
        lanes.to_float(static_cast<const char *>(x) + i * width(dtype), dtype, &s, 1);
        s = root == 0.f ? 0.f : root * (root * s);
        const float steps = s * (1.f / grid.spacing);
        const float whole = std::nearbyint(steps);
        const bool divided = std::fabs(steps) < 0x1p23f;
        const double moved = exact_steps(at, first + i, divided ? steps - whole : 0.f, grid.ratio);
        z[i] = (divided ? whole * grid.spacing : s) + static_cast<float>(moved) * grid.spacing;
    }
}

namespace {

// x + std N(0, 1) in place.
void add_noise(char *base, Dtype type, uint64_t first, int64_t n, double std, const Position &at, bool rounded, int threads) {
    const NoiseLanes &lanes = noise_lanes();
    const Grid grid(std);
    share_out((n + kTile - 1) / kTile, kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kTileRoom];
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t i = tile * kTile, count = std::min(kTile, n - i);
            float *z = noise_tile(lanes, at, rounded, first + i, count, room);
            char *here = base + i * width(type);
            if (rounded) {
                round_to_grid(lanes, at, grid, first + i, here, type, 1.f, z, count);
                lanes.from_float(z, here, type, count);
            } else {
                lanes.scale_add(here, here, type, z, 1.f, static_cast<float>(std), count);
            }
        }
    });
}

// add_noise to several tensors: address, dtype, first element, elements and standard deviation of each, at its own position.
using Noised = std::tuple<uintptr_t, int, uint64_t, int64_t, double>;

void add_noise_group(const std::vector<Noised> &every, const Position *positions, bool rounded, int threads) {
    for (const auto &[address, type, first, n, std] : every)
        add_noise(reinterpret_cast<char *>(address), static_cast<Dtype>(type), first, n, std, checked(*positions++), rounded, threads);
}

// The words of blocks [first, first + blocks).
void words(uint32_t *out, uint32_t first, int64_t blocks, const Position &at, int threads, const std::string &name) {
    const NoiseLanes &lanes = noise_lanes(name);
    share_out((blocks + kGroup - 1) / kGroup, 4 * kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) uint32_t room[kGroup * kBlockWords];
        for (int64_t group = begin; group < end; ++group) {
            const int64_t b = group * kGroup, count = std::min(kGroup, blocks - b);
            lanes.words(at, first + static_cast<uint32_t>(b), kGroup, room);
            std::copy(room, room + count * kBlockWords, out + b * kBlockWords);
        }
    });
}

// The normals of elements [first, first + n).
void normals(float *out, uint64_t first, int64_t n, const Position &at, int threads, const std::string &name) {
    const NoiseLanes &lanes = noise_lanes(name);
    share_out((n + kTile - 1) / kTile, kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kTileRoom];
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t i = tile * kTile, count = std::min(kTile, n - i);
            const float *z = noise_tile(lanes, at, false, first + i, count, room);
            std::copy(z, z + count, out + i);
        }
    });
}

// For the tests: the normal of one element as the sum of two float64.
std::pair<double, double> exact(const Position &at, uint64_t index) {
    const Pair z = exact_normal(at, index);
    return {z.hi, z.lo};
}

}  // namespace

void bind_noise(pybind11::module_ &m) {
    bind(m, "add_noise_group", &add_noise_group, "every", "positions", "rounded", "threads");
    bind(m, "chacha_words", &words, "out", "first", "blocks", "position", "threads", "isa");
    bind(m, "noise_normals", &normals, "out", "first", "n", "position", "threads", "isa");
    bind(m, "exact_normal", &exact, "position", "index");
}

}  // namespace fastdp
