// Choice of the instruction set, the rare wide radius, and add_noise: x + std N(0, 1) in one pass over memory.
#include "noise.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "bindings.h"

namespace fastdp {

namespace py = pybind11;

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
    chacha20_block(second, block, out);
    const double u = (std::ldexp(static_cast<double>(word), 32) + out[k] + 0.5) * 0x1p-64;
    return static_cast<float>(std::sqrt(-2.0 * std::log(u)));
}

const float *noise_tile(const NoiseLanes &lanes, const Position &at, bool folded, uint64_t first, int64_t n, float *z) {
    const uint64_t block = first / kBlockWords;
    const int64_t skip = static_cast<int64_t>(first % kBlockWords);
    const int64_t blocks = (skip + n + kBlockWords - 1) / kBlockWords;
    const int64_t made = folded ? 4 * blocks : blocks;
    lanes.normals(at, static_cast<uint32_t>(folded ? 4 * block : block), (made + kGroup - 1) / kGroup * kGroup, z);
    if (folded) lanes.fold(z, blocks * kBlockWords);
    return z + skip;
}

namespace {

void add_noise(uintptr_t x, int dtype, uint64_t first, int64_t n, double std, uintptr_t position, bool folded,
               int threads) {
    const Position at = *reinterpret_cast<const Position *>(position);
    const Dtype type = static_cast<Dtype>(dtype);
    const NoiseLanes &lanes = noise_lanes();
    char *base = reinterpret_cast<char *>(x);
    py::gil_scoped_release unlocked;
    share_out((n + kTile - 1) / kTile, kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kTileRoom];
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t i = tile * kTile, count = std::min(kTile, n - i);
            const float *z = noise_tile(lanes, at, folded, first + i, count, room);
            char *here = base + i * width(type);
            lanes.scale_add(here, here, type, z, 1.f, static_cast<float>(std), count);
        }
    });
}

void words(uintptr_t out, uint32_t first, int64_t blocks, uintptr_t position, int threads, const std::string &name) {
    const Position at = *reinterpret_cast<const Position *>(position);
    const NoiseLanes &lanes = noise_lanes(name);
    uint32_t *base = reinterpret_cast<uint32_t *>(out);
    py::gil_scoped_release unlocked;
    share_out((blocks + kGroup - 1) / kGroup, 4 * kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) uint32_t room[kGroup * kBlockWords];
        for (int64_t group = begin; group < end; ++group) {
            const int64_t b = group * kGroup, count = std::min(kGroup, blocks - b);
            lanes.words(at, first + static_cast<uint32_t>(b), kGroup, room);
            std::copy(room, room + count * kBlockWords, base + b * kBlockWords);
        }
    });
}

void normals(uintptr_t out, uint64_t first, int64_t n, uintptr_t position, bool folded, int threads,
             const std::string &name) {
    const Position at = *reinterpret_cast<const Position *>(position);
    const NoiseLanes &lanes = noise_lanes(name);
    float *base = reinterpret_cast<float *>(out);
    py::gil_scoped_release unlocked;
    share_out((n + kTile - 1) / kTile, kTilesAnItem, threads, [&](int64_t begin, int64_t end) {
        alignas(64) float room[kTileRoom];
        for (int64_t tile = begin; tile < end; ++tile) {
            const int64_t i = tile * kTile, count = std::min(kTile, n - i);
            const float *z = noise_tile(lanes, at, folded, first + i, count, room);
            std::copy(z, z + count, base + i);
        }
    });
}

}  // namespace

void bind_noise(py::module_ &m) {
    m.def("add_noise", &add_noise, "x + std N(0, 1) in place", py::arg("x"), py::arg("dtype"), py::arg("first"),
          py::arg("n"), py::arg("std"), py::arg("position"), py::arg("folded"), py::arg("threads"));
    m.def("chacha20_words", &words, "the words of blocks [first, first + blocks)", py::arg("out"), py::arg("first"),
          py::arg("blocks"), py::arg("position"), py::arg("threads"), py::arg("isa") = "");
    m.def("noise_normals", &normals, "the normals of elements [first, first + n)", py::arg("out"), py::arg("first"),
          py::arg("n"), py::arg("position"), py::arg("folded"), py::arg("threads"), py::arg("isa") = "");
}

}  // namespace fastdp
