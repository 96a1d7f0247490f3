// What the processor can do, asked once, and the package's one thread loop.
#pragma once
#include <cstdint>
#include <functional>

namespace fastdp {

enum class Isa { portable = 0, avx2 = 1, avx512 = 2 };

// The best instruction set of this processor, lowered by the environment variable FASTDP_ISA
// (portable | avx2 | avx512) so that every code path can be tested on one machine.
Isa isa();

int num_threads();
void set_num_threads(int n);

// Calls body(begin, end) over [0, n) cut into at most num_threads() contiguous pieces of at least
// `grain` items, on as many threads; the caller's thread takes the first. An exception in a piece is rethrown.
void parallel_for(int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)> &body);

}  // namespace fastdp
