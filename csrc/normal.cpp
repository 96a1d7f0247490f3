// The normal distribution's tails in float64, for privacy loss distributions: accounting needs no more of a library of
// special functions, whose import would take longer than most of what it computes.
#include <cmath>

#include "bindings.h"

namespace fastdp {
namespace {

constexpr double kRootHalf = 0.70710678118654752440;
constexpr double kHalfLogTwoPi = 0.91893853320467274178;

double mass_below(double x) { return 0.5 * std::erfc(-x * kRootHalf); }

double log_mass_below(double x) {
    if (x > 0) return std::log1p(-mass_below(-x));
    if (x > -10) return std::log(mass_below(x));
    // Laplace's continued fraction of density over mass: so far out, twenty terms leave less than a rounding. Beyond 1e154
    // the square overflows, and the logarithm is minus infinity.
    double ratio = -x;
    for (int term = 20; term > 0; --term) ratio = -x + term / ratio;
    return -0.5 * x * x - kHalfLogTwoPi - std::log(ratio);
}

// out[i] = Phi(x[i]), or its logarithm; both hold `count` float64 and may be the same.
void normal_mass_below(const double *x, int64_t count, bool logarithm, double *out) {
    for (int64_t i = 0; i < count; ++i) out[i] = logarithm ? log_mass_below(x[i]) : mass_below(x[i]);
}

}  // namespace

void bind_normal(pybind11::module_ &m) {
    bind(m, "normal_mass_below", &normal_mass_below, "x", "count", "logarithm", "out");
}

}  // namespace fastdp
