// Nearest row of a table: what stands on both sides of the matrix product that finds it.
//
// Rows are moved by a centre c (distances do not change), scaled by powers of two and rounded to the dtype of the product
// (torch's own, in bfloat16 or float32). With a = (x - c) / X and b = (t - c) / T, the nearest row minimises
//     g = rho |b|^2 / 2 - a.b,   rho = T / X,
// and the product s of the rounded rows a', b' obeys (Cauchy-Schwarz; Higham, Accuracy and Stability, section 3.1)
//     |s - a.b| <= |a - a'| |b| + |a'| |b - b'| + d 2^-22 |a'| |b'|  (+ 2^-8 |s| where s itself is rounded to bfloat16),
// whatever the order of the sums. So each row t has a lower and an upper bound of g; a row whose lower bound is above the
// smallest upper bound seen is not the nearest. The few that are left are compared by their distances in float64.
#include "snap.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "bindings.h"
#include "team.h"

namespace fastdp {
namespace {

// What rounding a row cost, as upper bounds: its norm, and the norm of what was rounded away.
struct RowBounds {
    float half_square, norm, lost;
};

FASTDP_BODY RowBounds round_row_body(const float *row, const float *centre, int64_t d, float scale, bool half,
                                     void *out) {
    f16 squares = {}, losses = {};
    for (int64_t i = 0; i < d; i += kLanes) {
        f16 x, c;
        const int64_t n = d - i < kLanes ? d - i : kLanes;
        load_tail(row + i, n, x);
        load_tail(centre + i, n, c);
        const f16 z = x * scale - c * scale;
        squares += z * z;
        if (!half) {
            std::memcpy(static_cast<float *>(out) + i, &z, n * sizeof(float));
            continue;
        }
        i16 bits = (i16)z;
        bits = (bits + 0x7fff + ((bits >> 16) & 1)) & static_cast<int32_t>(0xffff0000);
        const f16 rest = z - (f16)bits;
        losses += rest * rest;
        const h16 top = __builtin_convertvector((bits >> 16) & 0xffff, h16);
        if (n == kLanes) std::memcpy(static_cast<uint16_t *>(out) + i, &top, sizeof top);
        else std::memcpy(static_cast<uint16_t *>(out) + i, &top, n * sizeof(uint16_t));
    }
    float square = 0, loss = 0;
    for (int k = 0; k < kLanes; ++k) {
        square += squares[k];
        loss += losses[k];
    }
    // The sums above are of d/16 + 16 rounded terms; squares below 2^-126 may have vanished, hence the last term.
    const float grown = 1 + (d / 8 + 64) * 0x1p-23f, floor = std::sqrt(static_cast<float>(d)) * 0x1p-60f;
    const float norm = std::sqrt(square) * grown + floor;
    return {0.5f * square, norm, std::sqrt(loss) * grown + norm * 0x1p-22f + floor};
}

// Of one row of x, against the rows of a tile: the bounds' coefficients, in units where a and b are of order one.
struct RowTerms {
    float rho;     // of the half squares
    float norm;    // |a'|, times what b lost
    float lost;    // |a - a'|, times |b|
    float spill;   // relative error of s (its own rounding) and of the arithmetic here
    float square;  // relative error of rho |b|^2 / 2
    float floor;   // absolute: products and squares that underflow, and the rounding of float64 distances
};

constexpr int64_t kBlock = 16 * kLanes;

template <bool half>
FASTDP_BODY void load_scores(const void *scores, int64_t i, f16 &s) {
    if (half) {
        h16 top;
        std::memcpy(&top, static_cast<const uint16_t *>(scores) + i, sizeof top);
        s = (f16)(__builtin_convertvector(top, i16) << 16);
    } else {
        std::memcpy(&s, static_cast<const float *>(scores) + i, sizeof s);
    }
}

// Lower and upper bound of g for sixteen rows of the table.
template <bool half>
FASTDP_BODY void bounds_body(const RowTerms &row, const void *scores, const float *half_square, const float *norm,
                             const float *lost, int64_t i, f16 &lower, f16 &upper) {
    f16 h, n, l, s;
    load_scores<half>(scores, i, s);
    std::memcpy(&h, half_square + i, sizeof h);
    std::memcpy(&n, norm + i, sizeof n);
    std::memcpy(&l, lost + i, sizeof l);
    const f16 size = (f16)((i16)s & 0x7fffffff);
    const f16 p = h * row.rho;
    const f16 slack = size * row.spill + (n * row.lost + (l * row.norm + (p * row.square + row.floor)));
    const f16 g = p - s;
    lower = g - slack;
    upper = g + slack;
}

// Over kBlock rows of the table: lowers the bound `least`, and says whether any of them may still be the nearest.
template <bool half>
FASTDP_BODY bool block_body(const RowTerms &row, const void *scores, const float *half_square, const float *norm,
                            const float *lost, int64_t n, float &least) {
    f16 lows, highs;
    for (int k = 0; k < kLanes; ++k) lows[k] = highs[k] = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; i += kLanes) {
        f16 lower, upper;
        bounds_body<half>(row, scores, half_square, norm, lost, i, lower, upper);
        lows = lower < lows ? lower : lows;
        highs = upper < highs ? upper : highs;
    }
    float low = lows[0], high = highs[0];
    for (int k = 1; k < kLanes; ++k) {
        low = lows[k] < low ? lows[k] : low;
        high = highs[k] < high ? highs[k] : high;
    }
    if (high < least) least = high;
    return low <= least;
}

template <bool half>
FASTDP_BODY void lowers_body(const RowTerms &row, const void *scores, const float *half_square, const float *norm,
                             const float *lost, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i += kLanes) {
        f16 lower, upper;
        bounds_body<half>(row, scores, half_square, norm, lost, i, lower, upper);
        std::memcpy(out + i, &lower, sizeof lower);
    }
}

struct Lanes {
    RowBounds (*round_row)(const float *, const float *, int64_t, float, bool, void *);
    bool (*block[2])(const RowTerms &, const void *, const float *, const float *, const float *, int64_t, float &);
    void (*lowers[2])(const RowTerms &, const void *, const float *, const float *, const float *, int64_t, float *);
};

#define FASTDP_LANES(name, attribute)                                                                                  \
    struct name {                                                                                                      \
        attribute static RowBounds round_row(const float *row, const float *centre, int64_t d, float scale, bool half, \
                                             void *out) {                                                              \
            return round_row_body(row, centre, d, scale, half, out);                                                   \
        }                                                                                                              \
        template <bool half>                                                                                           \
        attribute static bool block(const RowTerms &row, const void *s, const float *h, const float *n,                \
                                    const float *l, int64_t count, float &least) {                                     \
            return block_body<half>(row, s, h, n, l, count, least);                                                    \
        }                                                                                                              \
        template <bool half>                                                                                           \
        attribute static void lowers(const RowTerms &row, const void *s, const float *h, const float *n,               \
                                     const float *l, int64_t count, float *out) {                                      \
            lowers_body<half>(row, s, h, n, l, count, out);                                                            \
        }                                                                                                              \
    };
FASTDP_LANES(Portable, )
#if FASTDP_HAS_X86
FASTDP_LANES(Avx2, FASTDP_AVX2)
FASTDP_LANES(Avx512, FASTDP_AVX512)
#endif
#undef FASTDP_LANES

template <class T>
constexpr Lanes lanes_of = {&T::round_row,
                            {&T::template block<false>, &T::template block<true>},
                            {&T::template lowers<false>, &T::template lowers<true>}};

const Lanes &lanes() {
#if FASTDP_HAS_X86
    if (isa() == Isa::avx512) return lanes_of<Avx512>;
    if (isa() == Isa::avx2) return lanes_of<Avx2>;
#endif
    return lanes_of<Portable>;
}

float from_bits(int32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The exponent e with |row| 2^-e of order one, kept where 2^-e is a normal float.
int exponent(int32_t bits) { return bits == 0 ? -126 : std::max(-126, std::min(126, std::ilogb(from_bits(bits)) + 1)); }

struct Candidate {
    float lower;
    int32_t index;
};
constexpr int kCandidates = 64;
constexpr int64_t kRowsAnItem = 16;

class Snap {
  public:
    Snap(const float *table, int64_t rows, int64_t d, const float *centre, int32_t table_bits, bool half, int threads)
        : table_(table), rows_(rows), d_(d), centre_(centre), centre_bits_(largest_bits(centre_, d)),
          table_exponent_(exponent(table_bits)), half_(half), threads_(threads), lanes_(lanes()) {}

    // Begins a search for n rows of x, and writes them, rounded, to `out` [n, d].
    void begin(const float *x, int64_t n, char *out) {
        x_ = x;
        n_ = n;
        terms_.resize(n);
        least_.assign(n, std::numeric_limits<float>::infinity());
        best_.assign(n, std::numeric_limits<double>::infinity());
        index_.assign(n, 0);
        count_.assign(n, 0);
        found_.resize(n * kCandidates);
        each(n, [&](int64_t i) {
            // Below 2^-100 of the table's scale a row is as good as zero, and rho must stay a float.
            const int32_t bits = std::max(largest_bits(x_ + i * d_, d_), centre_bits_);
            const int e = std::max(exponent(bits), std::max(-126, table_exponent_ - 100));
            const RowBounds row = round(x_ + i * d_, e, out, i);
            RowTerms &terms = terms_[i];
            terms.rho = std::ldexp(1.0f, table_exponent_ - e);
            terms.norm = (row.norm + row.lost) * (1 + 0x1p-20f);
            terms.lost = row.lost * (1 + 0x1p-20f);
            terms.spill = half_ ? 0x1p-8f * 1.01f + 0x1p-20f : 0x1p-20f;
            terms.square = (d_ / 8 + 64) * 0x1p-23f + 0x1p-20f;
            // Also what float64 cannot tell apart, so that a row goes only if its float64 distance is the larger one.
            const double same = std::ldexp(static_cast<double>(row.norm) * row.norm, e - table_exponent_);
            terms.floor = static_cast<float>(d_) * 0x1p-100f * (1 + terms.rho) +
                          static_cast<float>(same * static_cast<double>(d_ + 8) * 0x1p-51);
        });
    }

    // Writes rows [first, first + n) of the table, rounded, to `out` [n, d].
    void tile(int64_t first, int64_t n, char *out) {
        const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
        half_square_.assign(padded, std::numeric_limits<float>::infinity());
        norm_.assign(padded, 0);
        lost_.assign(padded, 0);
        const float products = static_cast<float>(d_) * 0x1p-22f;
        each(n, [&](int64_t i) {
            const RowBounds row = round(table_ + (first + i) * d_, table_exponent_, out, i);
            half_square_[i] = row.half_square;
            norm_[i] = row.norm;
            lost_[i] = row.lost + products * (row.norm + row.lost);
        });
    }

    // Takes the product of the rounded x and the tile [first, first + n): [rows of x, n], then 16 entries to spare.
    void scan(int64_t first, int64_t n, const char *scores) {
        const int64_t width = half_ ? 2 : 4;
        each(n_, [&](int64_t i) { scan_row(i, scores + i * n * width, width, first, n); });
    }

    void finish(int64_t *result) {
        each(n_, [&](int64_t i) {
            compact(i);
            // One candidate, and nothing compared before: it is the nearest whatever its distance.
            if (count_[i] == 1 && std::isinf(best_[i])) index_[i] = found_[i * kCandidates].index;
            else compare(i);
            result[i] = index_[i];
        });
    }

  private:
    template <class Body>
    void each(int64_t n, const Body &body) {
        team_for((n + kRowsAnItem - 1) / kRowsAnItem, threads_, [&](int64_t item) {
            for (int64_t i = item * kRowsAnItem; i < std::min(n, (item + 1) * kRowsAnItem); ++i) body(i);
        });
    }

    RowBounds round(const float *row, int e, char *out, int64_t i) const {
        return lanes_.round_row(row, centre_, d_, std::ldexp(1.0f, -e), half_, out + i * d_ * (half_ ? 2 : 4));
    }

    void scan_row(int64_t i, const char *scores, int64_t width, int64_t first, int64_t n) {
        float lowers[kBlock];
        for (int64_t j = 0; j < n; j += kBlock) {
            const int64_t m = std::min(kBlock, n - j);
            const char *s = scores + j * width;
            if (!lanes_.block[half_](terms_[i], s, &half_square_[j], &norm_[j], &lost_[j], m, least_[i])) continue;
            lanes_.lowers[half_](terms_[i], s, &half_square_[j], &norm_[j], &lost_[j], m, lowers);
            for (int64_t k = 0; k < m; ++k)
                if (lowers[k] <= least_[i]) add(i, lowers[k], static_cast<int32_t>(first + j + k));
        }
    }

    void add(int64_t i, float lower, int32_t index) {
        if (count_[i] == kCandidates) {
            compact(i);
            // Many rows too close to tell apart: settle these, so that the memory of a row of x never grows.
            if (count_[i] > kCandidates / 2) compare(i);
        }
        found_[i * kCandidates + count_[i]++] = {lower, index};
    }

    void compact(int64_t i) {
        Candidate *found = &found_[i * kCandidates];
        const float least = least_[i];
        count_[i] = static_cast<int>(
            std::remove_if(found, found + count_[i], [&](const Candidate &c) { return c.lower > least; }) - found);
    }

    void compare(int64_t i) {
        for (int k = 0; k < count_[i]; ++k) {
            const int32_t index = found_[i * kCandidates + k].index;
            const double distance = squared_distance(x_ + i * d_, table_ + index * d_, d_);
            if (distance < best_[i] || (distance == best_[i] && index < index_[i])) {
                best_[i] = distance;
                index_[i] = index;
            }
        }
        count_[i] = 0;
    }

    const float *table_, *x_ = nullptr;
    int64_t rows_, d_, n_ = 0;
    const float *centre_;
    int32_t centre_bits_;
    int table_exponent_;
    bool half_;
    int threads_;
    const Lanes &lanes_;
    std::vector<RowTerms> terms_;
    std::vector<float> least_, half_square_, norm_, lost_;
    std::vector<double> best_;
    std::vector<int32_t> index_;
    std::vector<int> count_;
    std::vector<Candidate> found_;
};

// (first row with a NaN or an infinity, or -1; the largest magnitude as the bits of a float)
std::pair<int64_t, int32_t> survey(const float *table, int64_t rows, int64_t d, int threads) {
    constexpr int64_t piece = 1024;
    std::atomic<int64_t> bad{rows};
    std::atomic<int32_t> most{0};
    team_for((rows + piece - 1) / piece, threads, [&](int64_t item) {
        int32_t local = 0;
        for (int64_t i = item * piece; i < std::min(rows, (item + 1) * piece); ++i) {
            const int32_t bits = largest_bits(table + i * d, d);
            if (bits >= kNonFinite) {
                int64_t seen = bad.load();
                while (i < seen && !bad.compare_exchange_weak(seen, i)) {}
                break;
            }
            local = std::max(local, bits);
        }
        int32_t seen = most.load();
        while (local > seen && !most.compare_exchange_weak(seen, local)) {}
    });
    return {bad < rows ? bad.load() : -1, most.load()};
}

bool has_bf16_products() {
#if FASTDP_HAS_X86
    return isa() == Isa::avx512 && (products().bf16 || products().tiles_bf16);
#else
    return false;
#endif
}

}  // namespace

void bind_snap(pybind11::module_ &m) {
    namespace py = pybind11;
    const auto made = [](const float *table, int64_t rows, int64_t d, const float *centre, int32_t table_bits, bool half,
                         int threads) { return new Snap(table, rows, d, centre, table_bits, half, threads); };
    py::class_<Snap>(m, "Snap", "a search for nearest rows; every pointer is of contiguous float32 unless it holds products")
        .def(py::init(from_python(+made)), py::arg("table"), py::arg("rows"), py::arg("d"), py::arg("centre"),
             py::arg("table_bits"), py::arg("half"), py::arg("threads"))
        .def("begin", from_python(&Snap::begin), py::arg("x"), py::arg("n"), py::arg("out"))
        .def("tile", from_python(&Snap::tile), py::arg("first"), py::arg("n"), py::arg("out"))
        .def("scan", from_python(&Snap::scan), py::arg("first"), py::arg("n"), py::arg("scores"))
        .def("finish", from_python(&Snap::finish), py::arg("out"));
    bind(m, "survey", &survey, "table", "rows", "d", "threads");
    bind(m, "has_bf16_products", &has_bf16_products);
}

}  // namespace fastdp
