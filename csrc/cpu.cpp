#include "cpu.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

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
    else if (name == "avx512" || name == "amx") asked = Isa::avx512;
    else throw std::invalid_argument("FASTDP_ISA is '" + name + "': use portable, avx2, avx512 or amx");
    if (asked > best) throw std::invalid_argument("FASTDP_ISA asks for " + name + ", which this processor lacks");
    return asked;
}

}  // namespace

Isa isa() {
    static const Isa found = detect();
    return found;
}

bool may_use_amx() {
    const char *wish = std::getenv("FASTDP_ISA");
    return isa() == Isa::avx512 && (wish == nullptr || *wish == '\0' || std::string(wish) == "amx");
}

void bind_cpu(pybind11::module_ &m) {
    m.def("isa", [] {
        switch (isa()) {
            case Isa::avx512: return "avx512";
            case Isa::avx2: return "avx2";
            default: return "portable";
        }
    });
}

}  // namespace fastdp
