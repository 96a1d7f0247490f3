// The package's one source of randomness: the ChaCha block function (RFC 8439, section 2.3) by position.
//
// A draw is addressed by a Position: 256 bits of key, a tensor id and a step; and it says of how many double rounds its
// blocks are made, 10 as in the RFC (ChaCha20) or 6 (ChaCha12). The sixteen input words of block b are
//   0..3   the constants of the RFC          13  tensor id (31 bits); the top bit is the domain flag
//   4..11  the key                           14  low 32 bits of the step
//   12     b, the block counter              15  high 32 bits of the step
// With the domain flag set, the block holds only the second halves of 64-bit uniforms (see wide_radius in noise.h), so
// it never meets a block that was drawn for itself.
#pragma once
#include <cstdint>

namespace fastdp {

constexpr uint32_t kDomainFlag = 0x80000000u;

struct Position {
    uint32_t key[8];
    uint32_t tensor;
    uint32_t step_low;
    uint32_t step_high;
    uint32_t double_rounds;
};
static_assert(sizeof(Position) == 48, "a position crosses the Python boundary as twelve 32-bit words");

// The sixteen words of one block.
void chacha_block(const Position &at, uint32_t block, uint32_t out[16]);

// A number in (0, 1] of two words, the low one first.
inline double uniform(const uint32_t *w) {
    return (static_cast<double>((static_cast<uint64_t>(w[1]) << 32) | w[0]) + 0.5) * 0x1p-64;
}

}  // namespace fastdp
