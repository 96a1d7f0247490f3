// What the processor can do, asked once.
#pragma once
// What a function needs that is compiled for one of them; and, of a function that has a form for each, that for this processor.
#if defined(__x86_64__) && defined(__GNUC__)
#define FASTDP_HAS_X86 1
#define FASTDP_AVX512 __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define FASTDP_AVX2 __attribute__((target("avx2,fma")))
#define FASTDP_BEST(form) (isa() == Isa::avx512 ? form##_avx512 : isa() == Isa::avx2 ? form##_avx2 : form##_portable)
#else
#define FASTDP_HAS_X86 0
#define FASTDP_BEST(form) form##_portable
#endif

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
