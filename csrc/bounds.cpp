// Sums over each unit's tokens of |L_t| |R_t|, the scale of every rounding error of its gradient: one pass over the rows; and
// bounds of norms from them.
#include "bounds.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
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

}  // namespace

void row_products_of(const Factor &left, const Factor &right, const Tokens &kept, bool one_hot, bool square, double *out,
                     double *counts, int threads) {
    kept.write_counts(counts);
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
    for (int64_t unit = 0; unit < kept.units(); ++unit) {
        out[unit] = 0;
        for (int64_t t = kept.bounds[unit]; t < kept.bounds[unit + 1]; ++t) out[unit] += products[t];
    }
}

namespace {

// counts[unit], float64: how many of a unit's tokens add to the gradient by any of the lefts, or by ids where there are none.
void token_counts(const Factor &left, const Factor &right, const std::vector<int64_t> &bounds, double *counts) {
    nonzero_tokens({left}, right, bounds).write_counts(counts);
}

// As row_products_of, over all tokens that add anything.
void row_products(const Factor &left, const Factor &right, const std::vector<int64_t> &bounds, bool one_hot, bool square,
                  double *out, double *counts, int threads) {
    const Tokens kept = nonzero_tokens(one_hot ? std::vector<Factor>{} : std::vector<Factor>{left}, right, bounds);
    row_products_of(left, right, kept, one_hot, square, out, counts, threads);
}

// Parts of the gradients: `count` rows of a power of each unit, float32 or float64; and of their products and tokens, or null.
using Block = std::tuple<Memory, bool, int64_t, Memory, Memory>;

// What `errors` holds of each row: what its powers are off by, relative to themselves and at least; what adding hides, against
// its products, besides the last six. These are, of the powers and then of adding, roundings for a unit, its tokens and its
// first tokens.
enum Error { kRelative, kLeast, kAdding, kFixed, kToken = 5, kEarlyToken = 7 };

// The bounds of fastdp/ops/bounds.py's upper_norms, float64: `groups` has the group of each row of all blocks, and `errors`
// [9][rows] what its rounding may hide. `norms` and `measured` are [count][units], and `cancelling` [units].
void upper_norms(std::vector<Block> blocks, const int64_t *groups, const double *errors, int64_t rows, int64_t count,
                 int64_t units, bool square, double *norms, double *measured, bool *cancelling) {
    std::vector<double> added(count * units);
    std::fill(norms, norms + count * units, 0.0);
    std::fill(measured, measured + count * units, 0.0);
    std::fill(cancelling, cancelling + units, false);
    const auto each = [&](const auto &take) {
        int64_t row = 0;
        for (const auto &[powers, wide, own, products, tokens] : blocks)
            for (int64_t i = 0; i < own; ++i, ++row)
                for (int64_t unit = 0; unit < units; ++unit) {
                    const auto entry = [at = i * units + unit](Memory memory) {
                        return memory.address == 0 ? 0.0 : reinterpret_cast<const double *>(memory.address)[at];
                    };
                    const auto *narrow = reinterpret_cast<const float *>(powers.address);
                    const double power = wide ? entry(powers) : narrow[i * units + unit];
                    take(row, unit, power, entry(products), entry(tokens));
                }
    };
    each([&](int64_t row, int64_t unit, double power, double product, double tokens) {
        const auto error = [&](int64_t number) { return errors[number * rows + row]; };
        const auto gamma = [&](int64_t which) {
            const double sum = error(kFixed + which) + error(kToken + which) * tokens +
                               error(kEarlyToken + which) * std::min(tokens, kEarly);
            return sum < 0.25 ? sum / (1 - sum) : std::numeric_limits<double>::infinity();
        };
        const double hidden = gamma(1) + error(kAdding);
        const int64_t at = groups[row] * units + unit;
        measured[at] += power;
        norms[at] += power + std::fabs(power) * error(kRelative) + error(kLeast) + (square ? product * product : product) * gamma(0);
        added[at] += square ? product * product * (hidden * hidden) : product * hidden;
    });
    for (int64_t at = 0; at < count * units; ++at) {
        const double least = norms[at] < 0 ? 0 : norms[at];
        norms[at] = (square ? std::sqrt(least) + std::sqrt(added[at]) : least + added[at]) * kOwnSlack;
    }
    each([&](int64_t row, int64_t unit, double, double product, double) {
        cancelling[unit] = cancelling[unit] || product > kCancelling * norms[groups[row] * units + unit];
    });
}

// weights[group][unit], float32: ratios at most 1 and never rounded up; 0 in every group unless all of a unit are `least`.
void round_down(const double *ratios, int64_t groups, int64_t units, double least, float *weights) {
    for (int64_t unit = 0; unit < units; ++unit) {
        bool kept = true;
        for (int64_t at = unit; at < groups * units; at += units) kept = kept && ratios[at] >= least;
        for (int64_t at = unit; at < groups * units; at += units)
            weights[at] = kept ? std::min(static_cast<float>(ratios[at] * (1 - 0x1p-23)), 1.0f) : 0.0f;
    }
}

}  // namespace

void bind_bounds(pybind11::module_ &m) {
    bind(m, "token_counts", &token_counts, "left", "right", "bounds", "counts");
    bind(m, "row_products", &row_products, "left", "right", "bounds", "one_hot", "square", "out", "counts", "threads");
    bind(m, "upper_norms", &upper_norms, "blocks", "groups", "errors", "rows", "count", "units", "square", "norms",
         "measured", "cancelling");
    bind(m, "round_down", &round_down, "ratios", "groups", "units", "least", "weights");
}

}  // namespace fastdp
