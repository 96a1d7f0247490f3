#include "chacha.h"

namespace fastdp {
namespace {

inline uint32_t rotl(uint32_t x, int n) { return (x << n) | (x >> (32 - n)); }

inline void quarter(uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d) {
    a += b, d = rotl(d ^ a, 16);
    c += d, b = rotl(b ^ c, 12);
    a += b, d = rotl(d ^ a, 8);
    c += d, b = rotl(b ^ c, 7);
}

}  // namespace

void chacha_block(const Position &at, uint32_t block, uint32_t out[16]) {
    const uint32_t in[16] = {0x61707865u, 0x3320646eu, 0x79622d32u, 0x6b206574u, at.key[0],  at.key[1],
                             at.key[2],   at.key[3],   at.key[4],   at.key[5],   at.key[6],  at.key[7],
                             block,       at.tensor,   at.step_low, at.step_high};
    for (int i = 0; i < 16; ++i) out[i] = in[i];
    for (uint32_t round = 0; round < at.double_rounds; ++round) {
        quarter(out[0], out[4], out[8], out[12]);
        quarter(out[1], out[5], out[9], out[13]);
        quarter(out[2], out[6], out[10], out[14]);
        quarter(out[3], out[7], out[11], out[15]);
        quarter(out[0], out[5], out[10], out[15]);
        quarter(out[1], out[6], out[11], out[12]);
        quarter(out[2], out[7], out[8], out[13]);
        quarter(out[3], out[4], out[9], out[14]);
    }
    for (int i = 0; i < 16; ++i) out[i] += in[i];
}

}  // namespace fastdp
