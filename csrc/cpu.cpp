#include "cpu.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

#include "bindings.h"

namespace fastdp {
namespace {

Isa detect() {
    Isa best = Isa::portable;
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best = Isa::avx2;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        best = Isa::avx512;
#endif
    const char *wish = std::getenv("FASTDP_ISA");
    if (wish == nullptr || *wish == '\0') return best;
    const std::string name(wish);
    Isa asked;
    if (name == "portable") asked = Isa::portable;
    else if (name == "avx2") asked = Isa::avx2;
    else if (name == "avx512") asked = Isa::avx512;
    else throw std::invalid_argument("FASTDP_ISA is '" + name + "': use portable, avx2 or avx512");
    if (asked > best) throw std::invalid_argument("FASTDP_ISA asks for " + name + ", which this processor lacks");
    return asked;
}

std::atomic<int> threads{0};

}  // namespace

Isa isa() {
    static const Isa found = detect();
    return found;
}

int num_threads() {
    const int set = threads.load();
    if (set > 0) return set;
    // Asked once: the answer costs a system call of several microseconds, more than a small kernel.
    static const int found = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    return found;
}

void set_num_threads(int n) {
    if (n < 1) throw std::invalid_argument("the number of threads must be at least 1");
    threads.store(n);
}

void bind_cpu(pybind11::module_ &m) {
    m.def("isa", [] {
        switch (isa()) {
            case Isa::avx512: return "avx512";
            case Isa::avx2: return "avx2";
            default: return "portable";
        }
    });
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads);
}

}  // namespace fastdp
