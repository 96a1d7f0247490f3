// What the processor can do, asked once.
#pragma once
namespace fastdp {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this processor, lowered by the environment variable FASTDP_ISA
// (portable | avx2 | avx512 | amx) so that every code path can be tested on one machine.
Isa isa();

// Products of short numbers that the processor has beside AVX-512, whatever FASTDP_ISA asks for.
struct Products {
    bool vnni = false, bf16 = false, tiles_bf16 = false, tiles_int8 = false;
};
const Products &products();

// Whether matrix tiles may be tried beside AVX-512: unless FASTDP_ISA asks for less.
bool may_use_amx();

}  // namespace fastdp
