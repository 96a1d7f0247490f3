// Sums over each unit's tokens of |L_t| |R_t|, the scale of every rounding error of its gradient: one pass over the rows.
#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings.h"
#include "block.h"
#include "factor.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int64_t kChunk = 1024;    // entries summed in float32 before they are added in float64
constexpr int64_t kTokensAnItem = 32;

// The L2 norm of row t of a factor, or its L1 norm; padded.
double row_norm(const BlockKernels &kernels, const Factor &factor, int64_t t, bool square, std::vector<float> &room) {
    double total = 0;
    for (int64_t start = 0; start < factor.width; start += kChunk) {
        const int64_t count = std::min(kChunk, factor.width - start);
        const float *x = room.data();
        if (factor.plain()) x = factor.row(t) + start;
        else read_row(factor, t, start, count, room.data());
        total += (square ? kernels.sum_squares : kernels.sum_sizes)(x, count);
    }
    return square ? std::sqrt(padded(total, factor.width)) : total + std::sqrt(kPaddingSquare) * factor.width;
}

// counts[unit], float64: how many of a unit's tokens add to the gradient by any of the lefts, or by ids where there are none.
void token_counts(const std::vector<Factor> &lefts, const Factor &right, const std::vector<int64_t> &bounds, double *counts) {
    const Tokens tokens = nonzero_tokens(lefts, right, bounds);
    for (int64_t unit = 0; unit < tokens.units(); ++unit)
        counts[unit] = static_cast<double>(tokens.bounds[unit + 1] - tokens.bounds[unit]);
}

// out[unit] = sum over its tokens of the norms of R's rows, times those of L's where L is no vector of ids; tokens that add
// nothing are left out.
void row_products(const Factor &left, const Factor &right, const std::vector<int64_t> &bounds, bool one_hot, bool square,
                  double *out, int threads) {
    const Tokens kept = nonzero_tokens(one_hot ? std::vector<Factor>{} : std::vector<Factor>{left}, right, bounds);
    const int64_t tokens = kept.count();
    const BlockKernels &kernels = block_kernels();
    std::vector<double> products(tokens);
    team_for((tokens + kTokensAnItem - 1) / kTokensAnItem, threads, [&](int64_t item) {
        static thread_local std::vector<float> room(kChunk);
        for (int64_t i = item * kTokensAnItem; i < std::min(tokens, (item + 1) * kTokensAnItem); ++i) {
            const int64_t t = kept.at[i];
            products[i] = row_norm(kernels, right, t, square, room) *
                          (one_hot ? 1 : row_norm(kernels, left, t, square, room));
        }
    });
    for (size_t unit = 0; unit + 1 < bounds.size(); ++unit) {
        out[unit] = 0;
        for (int64_t t = kept.bounds[unit]; t < kept.bounds[unit + 1]; ++t) out[unit] += products[t];
    }
}

}  // namespace

void bind_bounds(pybind11::module_ &m) {
    bind(m, "token_counts", &token_counts, "lefts", "right", "bounds", "counts");
    bind(m, "row_products", &row_products, "left", "right", "bounds", "one_hot", "square", "out", "threads");
}

}  // namespace fastdp
