// Rows of a table with multivariate Laplace (d_chi) noise: n = r u, u uniform on the sphere, r ~ Gamma(d, 1 / eta).
//
// Token i of the flattened ids draws from blocks of its own of one position, so that neither threads nor grouping matter:
//   blocks D i .. D i + D - 1, D = ceil(d / 16): the normals z whose direction is u (element j of the token is normal j);
//   block 2^32 - 1 - (16 i + a): attempt a at the gamma variate, of which 16 all fail with probability below 2^-69.
#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings.h"
#include "noise.h"
#include "snap.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int kAttempts = 16;

// Gamma(shape, 1), shape >= 1: Marsaglia and Tsang, "A simple method for generating gamma variables", 2000.
double gamma(const Position &at, int64_t token, double shape) {
    const double d = shape - 1.0 / 3.0, c = 1.0 / std::sqrt(9.0 * d);
    double v = 1.0;
    for (int a = 0; a < kAttempts; ++a) {
        uint32_t w[16];
        chacha_block(at, static_cast<uint32_t>((uint64_t{1} << 32) - 1 - (kAttempts * token + a)), w);
        const double x = std::sqrt(-2.0 * std::log(uniform(w))) * std::cos(6.283185307179586476925 * uniform(w + 2));
        const double root = 1.0 + c * x;
        if (root <= 0.0) continue;
        v = root * root * root;
        if (std::log(uniform(w + 4)) < 0.5 * x * x + d - d * v + d * std::log(v)) break;
    }
    return d * v;
}

double norm(const float *z, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(z[i]) * z[i];
    return std::sqrt(sum);
}

// out[k] = table[ids[k]] + noise of token first + k; eta has one entry a token, or one in all (eta_stride 0).
void dchi_rows(const float *table, const int64_t *ids, const double *eta, int64_t eta_stride, int64_t first, int64_t n,
               int64_t d, const Position &at, float *out, int threads) {
    const NoiseLanes &lanes = noise_lanes();
    const int64_t blocks = (d + kBlockWords - 1) / kBlockWords;
    // Tokens are taken together until their blocks fill whole vectors.
    const int64_t together = std::max<int64_t>(1, 4 * kGroup / blocks);
    team_for((n + together - 1) / together, threads, [&](int64_t item) {
        const int64_t begin = item * together, end = std::min(n, begin + together);
        const int64_t made = ((end - begin) * blocks + kGroup - 1) / kGroup * kGroup;
        std::vector<float> normals(made * kBlockWords);
        lanes.normals(at, static_cast<uint32_t>((first + begin) * blocks), made, normals.data(), false);
        for (int64_t k = begin; k < end; ++k) {
            const float *z = &normals[(k - begin) * blocks * kBlockWords];
            const double length = norm(z, d);
            const float scale = static_cast<float>(gamma(at, first + k, static_cast<double>(d)) /
                                                   (eta[k * eta_stride] * length));
            const float *row = table + ids[k] * d;
            for (int64_t j = 0; j < d; ++j) out[k * d + j] = row[j] + scale * z[j];
        }
    });
}

}  // namespace

void bind_dchi(pybind11::module_ &m) {
    bind(m, "dchi_rows", &dchi_rows, "table", "ids", "eta", "eta_stride", "first", "n", "d", "position", "out", "threads");
}

}  // namespace fastdp
