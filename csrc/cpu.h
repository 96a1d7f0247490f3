// What the processor can do, asked once.
#pragma once
namespace fastdp {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this processor, lowered by the environment variable FASTDP_ISA
// (portable | avx2 | avx512) so that every code path can be tested on one machine.
Isa isa();

int num_threads();
void set_num_threads(int n);

}  // namespace fastdp
