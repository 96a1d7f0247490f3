#include "cpu.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "bindings.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace fastdp {
namespace {

#if defined(__x86_64__) && defined(__GNUC__)
// Asked of the processor itself: a compiler's own table of features is not filled where another's runtime is linked.
struct Features {
    unsigned leaf1_ecx = 0, leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0, leaf7_1_eax = 0;  // as CPUID gives them
    unsigned saved = 0;  // registers that the operating system keeps for a thread (XCR0)

    Features() {
        unsigned a, b, c, d;
        if (!__get_cpuid(1, &a, &b, &c, &d)) return;
        leaf1_ecx = c;
        if (has(leaf1_ecx, 27)) {
            unsigned high;
            __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
        }
        if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
        leaf7_ebx = b, leaf7_ecx = c, leaf7_edx = d;
        if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) leaf7_1_eax = a;
    }

    static bool has(unsigned word, int bit) { return (word >> bit) & 1; }
    // FMA, AVX and F16C of leaf 1, AVX2 of leaf 7; the low and high halves of 16 registers are kept.
    bool avx2() const {
        return has(leaf1_ecx, 12) && has(leaf1_ecx, 28) && has(leaf1_ecx, 29) && has(leaf7_ebx, 5) && (saved & 0x6) == 0x6;
    }
    // F, DQ, BW and VL; masks and all of 32 registers are kept.
    bool avx512() const {
        return avx2() && has(leaf7_ebx, 16) && has(leaf7_ebx, 17) && has(leaf7_ebx, 30) && has(leaf7_ebx, 31) && (saved & 0xe6) == 0xe6;
    }
};
#endif

Isa detect() {
    Isa best = Isa::portable;
#if defined(__x86_64__) && defined(__GNUC__)
    const Features features;
    if (features.avx2()) best = Isa::avx2;
    if (features.avx512()) best = Isa::avx512;
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

const Products &products() {
    static const Products found = [] {
        Products p;
#if defined(__x86_64__) && defined(__GNUC__)
        const Features f;
        if (!f.avx512()) return p;
        p.vnni = Features::has(f.leaf7_ecx, 11);
        p.bf16 = Features::has(f.leaf7_1_eax, 5);
        p.tiles_bf16 = Features::has(f.leaf7_edx, 22);
        p.tiles_int8 = Features::has(f.leaf7_edx, 25);
#endif
        return p;
    }();
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
