// Draws of the exponential mechanism over a table: Pr[w | i] ~ exp(prior_w - scale min(|t_i - t_w|, cap)), exactly.
//
// A distance to every row is needed only to propose; what is proposed is accepted or not by its distance in float64
// (rejection sampling, von Neumann 1951), so the draws follow the law whatever the proposal's error. Rows are rounded to
// eight bits: with t = s q + e, the triangle inequality gives | |t_i - t_w| - |s_i q_i - s_w q_w| | <= |e_i| + |e_w|, a
// lower bound of the distance from an integer product, hence an upper bound of the weight. Integers do not round: the
// proposals, and so the draws, are the same for any number of threads and any order of work.
//
// A first pass keeps the bound of every row, in one byte a row and law (csrc/choice.h), as far down as 2^-61 of the
// largest weight that the law may have; a smaller bound is kept as that, which is larger and so still a bound. A draw picks
// a block of 256 rows from the running sum of the blocks' bounds, then one of its rows, and is accepted with exact weight /
// bound. A law whose weights are so small that the floor would stand above them is weighed again with a start of its own.
// Attempt a of token i uses words 0-7 (a even) or 8-15 (a odd) of block 64 i + a / 2: block, lane, acceptance, row of the lane.
// A token whose 126 attempts all fail draws from the exact distribution, computed for its law, with block 64 i + 63.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
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
#include "choice.h"
#include "snap.h"
#include "team.h"

namespace fastdp {
namespace {

constexpr int kAttempts = 126;
constexpr int64_t kBlocksAToken = 64;
constexpr int64_t kLawsAtOnce = 512;
constexpr int64_t kTokensAtOnce = 16;  // whose proposed rows are fetched while others are looked at
constexpr double kLevelsANat = kLevelsADoubling * 1.4426950408889634;
// What a level may be too low by: float32 arithmetic, and rounding up by adding 0.9999 and cutting off.
constexpr double kLevelError = 0x1p-8, kNearlyOne = 0.9999;

float up(double x) {
    const float y = static_cast<float>(x);
    return y < x ? std::nextafter(y, std::numeric_limits<float>::infinity()) : y;
}

float down(double x) { return -up(-x); }

struct Free {
    void operator()(uint8_t *at) const { std::free(at); }
};

// Memory for one call. Draws touch a few kilobytes anywhere in it: with pages of 2 MiB, where Linux gives them, they miss no
// page table.
std::unique_ptr<uint8_t, Free> scratch_of(int64_t bytes) {
    constexpr int64_t kPage = 1 << 21;
    const int64_t whole = (bytes + kPage - 1) / kPage * kPage;
    std::unique_ptr<uint8_t, Free> memory(static_cast<uint8_t *>(std::aligned_alloc(kPage, whole)));
    if (!memory) throw std::bad_alloc();
#if defined(__linux__)
    madvise(memory.get(), whole, MADV_HUGEPAGE);
#endif
    return memory;
}

struct Request {
    const float *table, *centre;
    int64_t rows, d;
    int exponent;               // of the table's scale
    const int64_t *order;       // tokens, those of one law together
    const int64_t *starts;      // [laws + 1], into order
    int64_t laws;
    const int64_t *law_ids;     // [laws], not decreasing
    const double *law_scales;   // [laws]
    const double *log_prior;    // [rows] or null
    double cap;
    Position at;
    int64_t *out;
    int threads;
};

class Chooser {
  public:
    explicit Chooser(const Request &request)
        : r_(request), blocks_((r_.rows + kBlockRowsOfTable - 1) / kBlockRowsOfTable), groups_(blocks_ * kBlockGroups),
          quads_((r_.d + 63) / 64 * 16), kernels_(choice_kernels()),
          scratch_(scratch_of(blocks_ * kBlockRowsOfTable * (width() + std::min(r_.laws, kLawsAtOnce)))), codes_(scratch_.get()),
          levels_(codes_ + groups_ * group_bytes()), features_(groups_) {
        for (int64_t row = 0; row < r_.rows; ++row) largest_prior_ = std::max(largest_prior_, prior(row));
        team_for(blocks_, r_.threads, [&](int64_t block) {
            for (int64_t g = block * kBlockGroups; g < (block + 1) * kBlockGroups; ++g) pack(g);
        });
    }

    // Laws [first, last).
    void choose(int64_t first, int64_t last) {
        std::vector<int64_t> ids, owner;  // distinct ids; of each law, which of them
        for (int64_t law = first; law < last; ++law) {
            if (ids.empty() || ids.back() != r_.law_ids[law]) ids.push_back(r_.law_ids[law]);
            owner.push_back(static_cast<int64_t>(ids.size()) - 1);
        }
        const int64_t n = static_cast<int64_t>(ids.size()), laws = last - first, at_once = kernels_.ids_at_once;
        std::vector<int8_t> left((n + at_once - 1) / at_once * at_once * width(), 0);
        std::vector<LawTerms> terms(laws);
        std::vector<int64_t> first_law(n + 1, laws);
        for (int64_t law = laws - 1; law >= 0; --law) first_law[owner[law]] = law;
        team_for(n, r_.threads, [&](int64_t i) {
            std::vector<int8_t> code(width());
            unpack(ids[i], code.data());
            kernels_.place(code.data(), i % at_once, quads_, left.data() + i / at_once * at_once * width());
            for (int64_t law = first_law[i]; law < first_law[i + 1]; ++law) terms[law] = terms_of(first + law, code.data());
        });
        masses_.resize(laws * blocks_);
        team_for(blocks_, r_.threads, [&](int64_t block) {
            weigh_block(block, left.data(), n, terms, owner, levels_ + block * laws * kBlockRowsOfTable);
        });
        team_for(laws, r_.threads, [&](int64_t law) {
            Weights w{levels_ + law * kBlockRowsOfTable, laws * kBlockRowsOfTable, &masses_[law * blocks_],
                      -kLevelError / kLevelsANat, {}};
            draw(first + law, terms[law], w);
        });
    }

  private:
    // What a law's draws are made from.
    struct Weights {
        const uint8_t *levels;  // of block b from levels + b * stride
        int64_t stride;
        const double *masses;  // of each block the sum of its weights
        double shift;          // log weights are less by the largest prior and more by this
        std::vector<double> ends;  // running sum of the masses
    };

    struct Proposal {
        int64_t row;
        double bound;
    };

    int64_t width() const { return 4 * quads_; }
    int64_t group_bytes() const { return width() * kLanes; }
    const uint8_t *codes(int64_t group) const { return codes_ + group * group_bytes(); }
    double prior(int64_t row) const { return r_.log_prior ? r_.log_prior[row] : 0.0; }

    void pack(int64_t group) {
        uint8_t *to = codes_ + group * group_bytes();
        std::fill(to, to + group_bytes(), uint8_t{128});
        GroupTerms &terms = features_[group];
        const float scale = std::ldexp(1.0f, -r_.exponent);
        for (int64_t k = 0; k < kLanes; ++k) {
            const int64_t row = group * kLanes + k;
            const bool real = row < r_.rows;
            const EightBits bits = real ? kernels_.round(r_.table + row * r_.d, r_.centre, r_.d, scale, to + 4 * k) : EightBits{};
            terms.step[k] = 2 * bits.step;
            terms.square[k] = bits.square * kSquareKept;
            terms.lost[k] = bits.lost;
            const bool possible = real && prior(row) > -std::numeric_limits<double>::infinity();
            terms.prior[k] = possible ? up(std::max(-kLimit, (prior(row) - largest_prior_) * kLevelsANat))
                                      : -std::numeric_limits<float>::infinity();
            terms.least[k] = possible ? kLeastLevel : 0;
        }
    }

    void unpack(int64_t row, int8_t *to) const {
        const uint8_t *from = codes(row / kLanes) + 4 * (row % kLanes);
        for (int64_t i = 0; i < width(); ++i) to[i] = static_cast<int8_t>(from[i / 4 * 4 * kLanes + i % 4] - 128);
    }

    LawTerms terms_of(int64_t law, const int8_t *code) const {
        const int64_t id = r_.law_ids[law];
        const GroupTerms &own = features_[id / kLanes];
        const int64_t lane = id % kLanes;
        int32_t sum = 0;
        for (int64_t i = 0; i < width(); ++i) sum += code[i];
        // A smaller scale or cap than the true one only loosens the bound, so both may be rounded, and limited, downwards;
        // 2^-20 of it is more than float32 loses in the level.
        return {id,
                own.step[lane] / 2,
                own.square[lane],
                own.lost[lane],
                128 * sum,
                down(std::min(kLimit, std::ldexp(r_.law_scales[law], r_.exponent) * kLevelsANat) * (1 - 0x1p-20)),
                down(std::min(kLimit, std::ldexp(r_.cap, -r_.exponent))),
                up(kTopLevel + kNearlyOne)};
    }

    void weigh_block(int64_t block, const int8_t *left, int64_t n, const std::vector<LawTerms> &terms,
                     const std::vector<int64_t> &owner, uint8_t *levels) {
        const int64_t at_once = kernels_.ids_at_once, laws = static_cast<int64_t>(terms.size());
        alignas(64) int32_t dots[kIdsATile * kGroupsAtOnce * kLanes];
        std::vector<float> sums(laws * kLanes);
        const bool plain = r_.log_prior == nullptr && std::isinf(r_.cap) &&
                           (block + 1) * kBlockRowsOfTable <= r_.rows;
        const auto weigh = plain ? kernels_.weigh_plain : kernels_.weigh;
        kernels_.enter();
        for (int64_t g = block * kBlockGroups; g < (block + 1) * kBlockGroups; g += kGroupsAtOnce) {
            int64_t law = 0;
            for (int64_t i = 0; i < n; i += at_once) {
                fetch_share(g + kGroupsAtOnce, i, std::min(n, i + at_once), n);
                kernels_.dots(left + i * width(), codes(g), codes(g + 1), quads_, dots);
                const int64_t begin = law;
                while (law < laws && owner[law] < i + at_once) ++law;
                weigh(&terms[begin], &owner[begin], i, law - begin, &features_[g], dots,
                      levels + begin * kBlockRowsOfTable + g % kBlockGroups * kLanes, &sums[begin * kLanes]);
            }
        }
        kernels_.leave();
        kernels_.fold(sums.data(), laws, &masses_[block], blocks_);
    }

    // Asks for parts [from, to) of n of the codes of two groups, so that they are near when their turn comes.
    void fetch_share(int64_t group, int64_t from, int64_t to, int64_t n) const {
        if (group >= groups_) return;
        const int64_t bytes = kGroupsAtOnce * group_bytes();
        for (int64_t at = from * bytes / n / 64 * 64; at < to * bytes / n; at += 64)
            __builtin_prefetch(codes(group) + at, 0, 2);
    }

    double log_weight(int64_t law, int64_t row) const {
        const int64_t id = r_.law_ids[law];
        const double distance =
            row == id ? 0.0 : std::sqrt(squared_distance(r_.table + id * r_.d, r_.table + row * r_.d, r_.d));
        return (prior(row) - largest_prior_) - r_.law_scales[law] * std::min(distance, r_.cap);
    }

    double add_up(Weights &w) const {
        w.ends.resize(blocks_);
        double total = 0;
        for (int64_t b = 0; b < blocks_; ++b) w.ends[b] = total += w.masses[b];
        return total;
    }

    struct OwnWeights {
        std::vector<uint8_t> levels;
        std::vector<double> masses;
    };

    // Weighs a law again, with its own highest level at the top.
    void raise(LawTerms terms, Weights &w, OwnWeights &own) const {
        std::vector<int8_t> code(width());
        unpack(terms.id, code.data());
        int32_t dots[kGroupsAtOnce * kLanes];
        float top = -std::numeric_limits<float>::infinity();
        for (int64_t g = 0; g < groups_; ++g) {
            kernels_.one(code.data(), codes(g), quads_, dots);
            top = std::max(top, kernels_.top(terms, features_[g], dots));
        }
        // Lower by what float32 may lose at the height of the largest weight, so that no level passes the top one.
        const double more = std::min(kLimit, std::max(0.0, kTopLevel + kNearlyOne - top - std::abs(top) * 0x1p-20));
        terms.start = up(kTopLevel + kNearlyOne + more);
        own.levels.resize(blocks_ * kBlockRowsOfTable);
        own.masses.resize(blocks_);
        const int64_t owner = 0;
        for (int64_t block = 0; block < blocks_; ++block) {
            float sums[kLanes] = {};
            for (int64_t g = block * kBlockGroups; g < (block + 1) * kBlockGroups; g += kGroupsAtOnce) {
                for (int h = 0; h < kGroupsAtOnce; ++h) kernels_.one(code.data(), codes(g + h), quads_, dots + h * kLanes);
                kernels_.weigh(&terms, &owner, 0, 1, &features_[g], dots, &own.levels[g * kLanes], sums);
            }
            kernels_.fold(sums, 1, &own.masses[block], 1);
        }
        w.levels = own.levels.data();
        w.stride = kBlockRowsOfTable;
        w.masses = own.masses.data();
        w.shift += more / kLevelsANat;
    }

    void draw(int64_t law, const LawTerms &terms, Weights &w) const {
        OwnWeights own;
        // What rows at the least level add is below a sixteenth, or the law gets a start of its own.
        if (add_up(w) < 16.0 * static_cast<double>(r_.rows) * value(kLeastLevel)) {
            raise(terms, w, own);
            add_up(w);
        }
        std::vector<double> exact;
        for (int64_t k = r_.starts[law]; k < r_.starts[law + 1]; k += kTokensAtOnce)
            draw_tokens(law, w, k, std::min(k + kTokensAtOnce, r_.starts[law + 1]), exact);
    }

    // Tokens order[first .. last): their first attempts side by side, so that the rows arrive together.
    void draw_tokens(int64_t law, const Weights &w, int64_t first, int64_t last, std::vector<double> &exact) const {
        uint32_t words[kTokensAtOnce][16];
        Proposal proposals[kTokensAtOnce];
        for (int64_t k = first; k < last; ++k) {
            chacha_block(r_.at, static_cast<uint32_t>(kBlocksAToken * r_.order[k]), words[k - first]);
            proposals[k - first] = propose(w, words[k - first]);
            const float *row = r_.table + proposals[k - first].row * r_.d;
            for (int64_t i = 0; i < r_.d; i += 16) __builtin_prefetch(row + i);
        }
        for (int64_t k = first; k < last; ++k) {
            const int64_t token = r_.order[k];
            uint32_t *mine = words[k - first];
            Proposal proposal = proposals[k - first];
            bool taken = accepted(law, w, proposal, mine);
            for (int a = 1; a < kAttempts && !taken; ++a) {
                if (a % 2 == 0) chacha_block(r_.at, static_cast<uint32_t>(kBlocksAToken * token + a / 2), mine);
                proposal = propose(w, mine + 8 * (a % 2));
                taken = accepted(law, w, proposal, mine + 8 * (a % 2));
            }
            if (!taken) {
                if (exact.empty()) exact = distribution(law);
                chacha_block(r_.at, static_cast<uint32_t>(kBlocksAToken * token + kBlocksAToken - 1), mine);
                proposal.row = pick(exact, uniform(mine) * exact.back());
            }
            r_.out[token] = proposal.row;
        }
    }

    // The first entry of a running sum above `target`.
    static int64_t pick(const std::vector<double> &ends, double target) {
        const auto at = std::upper_bound(ends.begin(), ends.end(), target);
        // At the very end rounding may leave nothing above the target: the last entry that has a weight.
        return (at != ends.end() ? at : std::lower_bound(ends.begin(), ends.end(), ends.back())) - ends.begin();
    }

    static double value(uint8_t level) {
        const uint32_t bits = static_cast<uint32_t>(level) << kLevelShift;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }

    Proposal propose(const Weights &w, const uint32_t *words) const {
        const int64_t block = pick(w.ends, uniform(words) * w.ends.back());
        const uint8_t *levels = w.levels + block * w.stride;
        float cells[kLanes];
        kernels_.cells(levels, cells);
        double sum = 0;
        for (const float cell : cells) sum += cell;
        double left = uniform(words + 2) * sum;
        int lane = 0, group = 0;
        for (; lane < kLanes - 1 && left >= cells[lane]; ++lane) left -= cells[lane];
        // The float sums decide between lanes alone: a weight that vanished in one keeps its share within the lane.
        double column[kBlockGroups], lane_sum = 0;
        for (int g = 0; g < kBlockGroups; ++g) lane_sum += column[g] = value(levels[g * kLanes + lane]);
        left = uniform(words + 6) * lane_sum;
        for (; group < kBlockGroups - 1 && left >= column[group]; ++group) left -= column[group];
        // A weight of 0, or a row past the table's end, is met only where rounding leaves something over.
        const int64_t row = (block * kBlockGroups + group) * kLanes + lane;
        if (row >= r_.rows || column[group] == 0) return {0, 0.0};
        return {row, w.masses[block] * (cells[lane] / sum) * (column[group] / lane_sum)};
    }

    bool accepted(int64_t law, const Weights &w, const Proposal &proposal, const uint32_t *words) const {
        if (proposal.bound == 0) return false;
        const double weight = std::exp(log_weight(law, proposal.row) + w.shift) * value(kTopLevel);
        if (weight > proposal.bound)
            throw std::logic_error("exponential_choice: a weight is above its bound, so its draws would be wrong");
        return uniform(words + 4) * proposal.bound < weight;
    }

    std::vector<double> distribution(int64_t law) const {
        std::vector<double> ends(r_.rows);
        for (int64_t row = 0; row < r_.rows; ++row) ends[row] = log_weight(law, row);
        const double most = *std::max_element(ends.begin(), ends.end());
        if (!std::isfinite(most))
            throw std::domain_error("no row has a weight for id " + std::to_string(r_.law_ids[law]) +
                                    ": its scale times every distance is beyond float64");
        double total = 0;
        for (double &end : ends) end = total += std::exp(end - most);
        return ends;
    }

    static constexpr double kLimit = 1e30;
    static constexpr float kSquareKept = 1 - 0x1p-20f;

    const Request r_;
    const int64_t blocks_, groups_, quads_;
    const ChoiceKernels &kernels_;
    double largest_prior_ = -std::numeric_limits<double>::infinity();
    const std::unique_ptr<uint8_t, Free> scratch_;
    uint8_t *const codes_, *const levels_;
    std::vector<GroupTerms> features_;
    std::vector<double> masses_;  // [laws][blocks]
};

void exponential_choice(const float *table, int64_t rows, int64_t d, const float *centre, int32_t table_bits,
                        const int64_t *order, const int64_t *starts, int64_t laws, const int64_t *law_ids,
                        const double *law_scales, const double *log_prior, double cap,
                        const Position &position, int64_t *out, int threads) {
    float largest;
    std::memcpy(&largest, &table_bits, sizeof largest);
    const int exponent = table_bits == 0 ? 0 : std::max(-126, std::min(126, std::ilogb(largest) + 1));
    Chooser chooser({table, centre, rows, d, exponent, order, starts, laws, law_ids, law_scales, log_prior, cap,
                     position, out, threads});
    for (int64_t first = 0; first < laws; first += kLawsAtOnce) chooser.choose(first, std::min(laws, first + kLawsAtOnce));
}

}  // namespace

void bind_choice(pybind11::module_ &m) {
    bind(m, "exponential_choice", &exponential_choice, "table", "rows", "d", "centre", "table_bits", "order", "starts",
         "laws", "law_ids", "law_scales", "log_prior", "cap", "position", "out", "threads");
    m.def("has_matrix_tiles", [] { return choice_kernels().ids_at_once == kIdsATile; },
          "whether exponential_choice multiplies in the processor's matrix unit");
}

}  // namespace fastdp
