// Norms that look at each entry of a unit's gradient L^T R: squared, absolute, and squared under a mask.
//
// A band of 96 x 64 entries is computed, reduced and forgotten; the largest scratch is a unit's panel of columns. A BLAS
// would write each product out for a second pass to read back.
#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bindings.h"
#include "block.h"
#include "bounds.h"
#include "factor.h"
#include "team.h"

namespace fastdp {
namespace {

// out[which][unit], float32: the measure of the gradient of the unit that owns tokens [bounds[unit], bounds[unit + 1]), zero
// where it owns none. Left [tokens, m] and right [tokens, n] as factor.h reads them; `mask` bytes [m, n], read under
// masked_square alone, whose second row is what lies outside. Sums are float32 over a row of a band and float64 beyond, in
// an order that neither threads nor zero tokens change. Unless `gradients` is null, float32 [units][m][n], the gradients
// that are measured are kept there.
void norms_of(const Factor &left, const Factor &right, const Tokens &tokens, Measure measure, const uint8_t *mask, float *out,
              float *gradients, int threads) {
    const int64_t units = tokens.units(), m = left.width, n = right.width;
    const int64_t panels = (n + kBlockColumns - 1) / kBlockColumns;
    const BlockKernels &kernels = block_kernels();
    const std::vector<uint64_t> words = MaskRows{mask, n}.words(kernels, m, threads);
    std::vector<double> partial(units * panels * 2);
    team_for(units * panels, threads, [&](int64_t item) {
        static thread_local Panels panels_of_thread;
        const int64_t unit = item / panels, panel = item % panels;
        const int64_t first = tokens.bounds[unit], last = tokens.bounds[unit + 1];
        if (first == last && gradients == nullptr) return;
        const int64_t columns = std::min(kBlockColumns, n - panel * kBlockColumns);
        const uint64_t valid = first_bits(columns);
        if (first == last) {
            for (int64_t row = 0; row < m; ++row)
                std::fill_n(gradients + (unit * m + row) * n + panel * kBlockColumns, columns, 0.0f);
            return;
        }
        const Rows r = right_panel(right, tokens, first, last, panel * kBlockColumns, columns, m, panels_of_thread);
        alignas(64) float band[kChunkRows * kBlockColumns];
        for (int64_t start = 0; start < m; start += kChunkRows) {
            const int64_t rows = std::min(kChunkRows, m - start);
            compute_band(kernels, left, r, tokens, first, last, start, rows, columns, panels_of_thread, band);
            if (gradients != nullptr)
                for (int64_t row = 0; row < rows; ++row)
                    std::copy_n(band + row * kBlockColumns, columns,
                                gradients + (unit * m + start + row) * n + panel * kBlockColumns);
            float sums[2] = {0, 0};
            for (int64_t row = 0; row < rows; ++row)
                add_measure(kernels, measure, band + row * kBlockColumns, valid,
                            measure == Measure::masked_square ? words[(start + row) * panels + panel] : 0, sums);
            partial[item * 2] += sums[0];
            partial[item * 2 + 1] += sums[1];
        }
    });
    sum_parts(partial, measure, units, panels, out);
}

void direct_norms(const Factor &left, const Factor &right, const std::vector<int64_t> &bounds, Measure measure,
                  const uint8_t *mask, float *out, float *gradients, int threads) {
    norms_of(left, right, nonzero_tokens({left}, right, bounds), measure, mask, out, gradients, threads);
}

// Of each pair what direct_norms has as `squares` [pair][unit], transposed where the left is wider than `few` columns and the
// right not; 0 where `known` says so; and what row_products has.
void direct_norms_group(const std::vector<Factor> &lefts, const std::vector<Factor> &rights, const std::vector<int64_t> &bounds,
                        const std::vector<bool> &known, int64_t few, float *squares, double *products, double *counts,
                        int threads) {
    const int64_t units = static_cast<int64_t>(bounds.size()) - 1;
    for (size_t pair = 0; pair < lefts.size(); ++pair, squares += units, products += units, counts += units) {
        const Factor &left = lefts[pair], &right = rights[pair];
        const Tokens tokens = nonzero_tokens({left}, right, bounds);
        const bool turned = right.width <= few && few < left.width;
        if (known[pair]) std::fill_n(squares, units, 0.0f);
        else norms_of(turned ? right : left, turned ? left : right, tokens, Measure::square, nullptr, squares, nullptr, threads);
        row_products_of(left, right, tokens, false, true, products, counts, threads);
    }
}

}  // namespace

void bind_norms_direct(pybind11::module_ &m) {
    bind(m, "direct_norms", &direct_norms, "left", "right", "bounds", "measure", "mask", "out", "gradients", "threads");
    bind(m, "direct_norms_group", &direct_norms_group, "lefts", "rights", "bounds", "known", "few", "squares", "products",
         "counts", "threads");
}

}  // namespace fastdp
