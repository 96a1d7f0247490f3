// Draws of the exponential mechanism over a table: Pr[w | i] ~ exp(prior_w - scale c_w min(|t_i - t_w|, cap)), exactly.
//
// A distance to every row is needed only to propose; what is proposed is accepted or not by its distance in float64
// (rejection sampling, von Neumann 1951), so the draws follow the law whatever the proposal's error. Rows are rounded to
// eight bits: with t = s q + e, the triangle inequality gives | |t_i - t_w| - |s_i q_i - s_w q_w| | <= |e_i| + |e_w|, a
// lower bound of the distance from an integer product, hence an upper bound of the weight. Integers do not round: the
// proposals, and so the draws, are the same for any number of threads and any order of work.
//
// The table's rows are taken sixteen at a time. A first pass over all of them keeps one number a group, the sum of its
// bounds; a draw picks a group, recomputes its sixteen bounds, picks one, and is accepted with exact weight / bound.
// Attempt a of token i uses words 0-5 (a even) or 8-13 (a odd) of block 64 i + a / 2: group, row in the group, acceptance.
// A token whose 126 attempts all fail draws from the exact distribution, computed for its law, with block 64 i + 63.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "bindings.h"
#include "chacha.h"
#include "exponential.h"
#include "snap.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int kAttempts = 126;
constexpr int64_t kBlocksAToken = 64;
constexpr int64_t kLawsAtOnce = 504;

double uniform(const uint32_t *w) {
    return (static_cast<double>((static_cast<uint64_t>(w[1]) << 32) | w[0]) + 0.5) * 0x1p-64;
}

float up(double x) {
    const float y = static_cast<float>(x);
    return y < x ? std::nextafter(y, std::numeric_limits<float>::infinity()) : y;
}

float down(double x) { return -up(-x); }

// Draws touch a few kilobytes anywhere in the codes: with pages of 2 MiB, where Linux gives them, they miss no page table.
uint8_t *new_codes(int64_t bytes) {
    constexpr int64_t page = 1 << 21;
    bytes = (bytes + page - 1) / page * page;
    void *codes = std::aligned_alloc(page, bytes);
    if (codes == nullptr) throw std::bad_alloc();
#if defined(__linux__)
    madvise(codes, bytes, MADV_HUGEPAGE);
#endif
    return static_cast<uint8_t *>(codes);
}

struct Request {
    const float *table, *centre;
    int64_t rows, d;
    int exponent;               // of the table's scale
    const int64_t *order;       // tokens, those of one law together
    const int64_t *starts;      // [laws + 1], into order
    const int64_t *law_ids;     // [laws], not decreasing
    const double *law_scales;   // [laws]
    const double *log_prior;    // [rows] or null
    const double *slopes;       // [rows] or null
    double cap;
    Position at;
    int64_t *out;
};

class Chooser {
  public:
    explicit Chooser(const Request &request)
        : r_(request), groups_((r_.rows + kLanes - 1) / kLanes), quads_((r_.d + 3) / 4), kernels_(exponential_kernels()),
          codes_(new_codes(groups_ * group_bytes()), &std::free), features_(groups_) {
        team_for((groups_ + 15) / 16, num_threads(), [&](int64_t item) {
            for (int64_t g = item * 16; g < std::min(groups_, (item + 1) * 16); ++g) pack(g);
        });
    }

    // Laws [first, last).
    void choose(int64_t first, int64_t last) {
        std::vector<int64_t> ids, owner;  // distinct ids; of each law, which of them
        for (int64_t law = first; law < last; ++law) {
            if (ids.empty() || ids.back() != r_.law_ids[law]) ids.push_back(r_.law_ids[law]);
            owner.push_back(static_cast<int64_t>(ids.size()) - 1);
        }
        const int64_t n = static_cast<int64_t>(ids.size()), padded = (n + kIdsAtOnce - 1) / kIdsAtOnce * kIdsAtOnce;
        std::vector<int8_t> left(padded * quads_ * 4, 0);
        for (int64_t i = 0; i < n; ++i) unpack(ids[i], &left[i * quads_ * 4]);
        std::vector<LawTerms> terms;
        std::vector<int64_t> first_law(n + 1, last - first);
        for (int64_t law = first; law < last; ++law) {
            const int64_t i = owner[law - first];
            first_law[i] = std::min(first_law[i], law - first);
            terms.push_back(terms_of(law, &left[i * quads_ * 4]));
        }
        sums_.resize((last - first) * groups_);
        tops_.resize((last - first) * groups_);
        team_for((groups_ + kGroupsAtOnce - 1) / kGroupsAtOnce, num_threads(), [&](int64_t item) {
            const int64_t g = item * kGroupsAtOnce, count = std::min<int64_t>(kGroupsAtOnce, groups_ - g);
            int32_t dots[kIdsAtOnce * kGroupsAtOnce * kLanes];
            for (int64_t i = 0; i < n; i += kIdsAtOnce) {
                kernels_.dots(&left[i * quads_ * 4], codes(g), codes(g + count - 1), quads_, dots);
                for (int64_t k = i; k < std::min(n, i + kIdsAtOnce); ++k)
                    for (int64_t law = first_law[k]; law < first_law[k + 1]; ++law)
                        for (int64_t h = 0; h < count; ++h)
                            kernels_.sum(terms[law], features_[g + h], dots + ((k - i) * kGroupsAtOnce + h) * kLanes,
                                         tops_[law * groups_ + g + h], sums_[law * groups_ + g + h]);
            }
        });
        team_for(last - first, num_threads(), [&](int64_t law) {
            draw(first + law, terms[law], &left[owner[law] * quads_ * 4], &tops_[law * groups_], &sums_[law * groups_]);
        });
    }

  private:
    int64_t group_bytes() const { return quads_ * 4 * kLanes; }
    const uint8_t *codes(int64_t group) const { return codes_.get() + group * group_bytes(); }
    double slope(int64_t row) const { return r_.slopes ? r_.slopes[row] : 1.0; }
    double prior(int64_t row) const { return r_.log_prior ? r_.log_prior[row] : 0.0; }

    void pack(int64_t group) {
        uint8_t *to = codes_.get() + group * group_bytes();
        std::fill(to, to + group_bytes(), uint8_t{128});
        GroupTerms &terms = features_[group];
        const float scale = std::ldexp(1.0f, -r_.exponent);
        for (int64_t k = 0; k < kLanes; ++k) {
            const int64_t row = group * kLanes + k;
            const bool real = row < r_.rows;
            const EightBits bits = real ? kernels_.round(r_.table + row * r_.d, r_.centre, r_.d, scale, to + 4 * k) : EightBits{};
            terms.step[k] = bits.step;
            terms.square[k] = bits.square;
            terms.lost[k] = bits.lost;
            terms.slope[k] = real ? std::max(0.0f, down(slope(row))) : 0.0f;
            terms.prior[k] = real ? up(prior(row)) : -std::numeric_limits<float>::infinity();
        }
    }

    void unpack(int64_t row, int8_t *to) const {
        const uint8_t *from = codes(row / kLanes) + 4 * (row % kLanes);
        for (int64_t i = 0; i < 4 * quads_; ++i)
            to[i] = static_cast<int8_t>(from[i / 4 * 4 * kLanes + i % 4] - 128);
    }

    LawTerms terms_of(int64_t law, const int8_t *code) const {
        const int64_t id = r_.law_ids[law];
        const GroupTerms &own = features_[id / kLanes];
        const int64_t lane = id % kLanes;
        int32_t sum = 0;
        for (int64_t i = 0; i < 4 * quads_; ++i) sum += code[i];
        // A smaller slope or cap than the true one only loosens the bound, so both may be rounded, and limited, downwards.
        const double limit = 1e30;
        return {own.step[lane],
                own.square[lane],
                own.lost[lane],
                128 * sum,
                down(std::min(limit, std::ldexp(r_.law_scales[law], r_.exponent)) * (1 - 0x1p-30)),
                down(std::min(limit, std::ldexp(r_.cap, -r_.exponent)))};
    }

    double log_weight(int64_t law, int64_t row) const {
        const int64_t id = r_.law_ids[law];
        const double distance =
            row == id ? 0.0 : std::sqrt(squared_distance(r_.table + id * r_.d, r_.table + row * r_.d, r_.d));
        return prior(row) - r_.law_scales[law] * slope(row) * std::min(distance, r_.cap);
    }

    void draw(int64_t law, const LawTerms &terms, const int8_t *left, const float *tops, const float *sums) const {
        float top = tops[0];
        for (int64_t g = 1; g < groups_; ++g) top = std::max(top, tops[g]);
        std::vector<float> bounds(groups_ + kLanes);
        kernels_.weights(tops, sums, top, groups_, bounds.data());
        std::vector<double> ends(groups_);
        double total = 0;
        for (int64_t g = 0; g < groups_; ++g) ends[g] = total += bounds[g];
        std::vector<double> exact;
        for (int64_t k = r_.starts[law]; k < r_.starts[law + 1]; ++k) {
            const int64_t token = r_.order[k];
            int64_t row = -1;
            uint32_t words[16];
            for (int a = 0; a < kAttempts && row < 0; ++a) {
                if (a % 2 == 0) chacha20_block(r_.at, static_cast<uint32_t>(kBlocksAToken * token + a / 2), words);
                row = attempt(law, terms, left, ends, bounds, top, words + 8 * (a % 2));
            }
            if (row < 0) {
                if (exact.empty()) exact = distribution(law, top);
                chacha20_block(r_.at, static_cast<uint32_t>(kBlocksAToken * token + kBlocksAToken - 1), words);
                row = pick(exact, uniform(words) * exact.back());
            }
            r_.out[token] = row;
        }
    }

    // The first entry of a running sum above `target`.
    static int64_t pick(const std::vector<double> &ends, double target) {
        const auto at = std::upper_bound(ends.begin(), ends.end(), target);
        // At the very end rounding may leave nothing above the target: the last entry that has a weight.
        return (at != ends.end() ? at : std::lower_bound(ends.begin(), ends.end(), ends.back())) - ends.begin();
    }

    int64_t attempt(int64_t law, const LawTerms &terms, const int8_t *left, const std::vector<double> &ends,
                    const std::vector<float> &bounds, float top, const uint32_t *words) const {
        const int64_t g = pick(ends, uniform(words) * ends.back());
        int32_t dots[kLanes];
        float weights[kLanes];
        kernels_.one(left, codes(g), quads_, dots);
        kernels_.weigh(terms, features_[g], dots, weights);
        double sum = 0, passed = 0;
        for (float w : weights) sum += w;
        const double target = uniform(words + 2) * sum;
        int k = 0;
        while (k < kLanes - 1 && (passed += weights[k]) <= target) ++k;
        const int64_t row = g * kLanes + k;
        if (row >= r_.rows) return -1;
        const double proposed = bounds[g] * (weights[k] / sum), weight = std::exp(log_weight(law, row) - top);
        if (weight > proposed)
            throw std::logic_error("exponential_choice: a weight is above its bound, so its draws would be wrong");
        return uniform(words + 4) * proposed < weight ? row : -1;
    }

    std::vector<double> distribution(int64_t law, float top) const {
        std::vector<double> ends(r_.rows);
        double total = 0;
        for (int64_t row = 0; row < r_.rows; ++row) ends[row] = total += std::exp(log_weight(law, row) - top);
        return ends;
    }

    const Request r_;
    const int64_t groups_, quads_;
    const ExponentialKernels &kernels_;
    std::unique_ptr<uint8_t, decltype(&std::free)> codes_;
    std::vector<GroupTerms> features_;
    std::vector<float> sums_, tops_;
};

void exponential_choice(uintptr_t table, int64_t rows, int64_t d, uintptr_t centre, int32_t table_bits, uintptr_t order,
                        uintptr_t starts, int64_t laws, uintptr_t law_ids, uintptr_t law_scales, uintptr_t log_prior,
                        uintptr_t slopes, double cap, uintptr_t position, uintptr_t out) {
    float largest;
    std::memcpy(&largest, &table_bits, sizeof largest);
    const int exponent = table_bits == 0 ? 0 : std::max(-126, std::min(126, std::ilogb(largest) + 1));
    Chooser chooser({reinterpret_cast<const float *>(table), reinterpret_cast<const float *>(centre), rows, d, exponent,
                     reinterpret_cast<const int64_t *>(order), reinterpret_cast<const int64_t *>(starts),
                     reinterpret_cast<const int64_t *>(law_ids), reinterpret_cast<const double *>(law_scales),
                     reinterpret_cast<const double *>(log_prior), reinterpret_cast<const double *>(slopes), cap,
                     *reinterpret_cast<const Position *>(position), reinterpret_cast<int64_t *>(out)});
    for (int64_t first = 0; first < laws; first += kLawsAtOnce) chooser.choose(first, std::min(laws, first + kLawsAtOnce));
}

}  // namespace

void bind_exponential(pybind11::module_ &m) {
    namespace py = pybind11;
    m.def("exponential_choice", &exponential_choice, py::call_guard<py::gil_scoped_release>(), py::arg("table"),
          py::arg("rows"), py::arg("d"), py::arg("centre"), py::arg("table_bits"), py::arg("order"), py::arg("starts"),
          py::arg("laws"), py::arg("law_ids"), py::arg("law_scales"), py::arg("log_prior"), py::arg("slopes"),
          py::arg("cap"), py::arg("position"), py::arg("out"));
}

}  // namespace fastdp
