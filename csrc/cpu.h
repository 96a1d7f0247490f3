// What the processor can do, asked once.
#pragma once
namespace fastdp {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this processor, lowered by the environment variable FASTDP_ISA
// (portable | avx2 | avx512 | amx) so that every code path can be tested on one machine.
Isa isa();

// Whether matrix tiles may be tried beside AVX-512: unless FASTDP_ISA asks for less.
bool may_use_amx();


}  // namespace fastdp
