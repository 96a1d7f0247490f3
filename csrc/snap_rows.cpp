// Exact distances and magnitudes of single rows.
#include "snap.h"

namespace fastdp {
namespace {

FASTDP_BODY double distance_portable(const float *a, const float *b, int64_t d) {
    d8 low = {}, high = {};
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        f8 p, q, r, s;
        std::memcpy(&p, a + i, sizeof p);
        std::memcpy(&q, b + i, sizeof q);
        std::memcpy(&r, a + i + 8, sizeof r);
        std::memcpy(&s, b + i + 8, sizeof s);
        const d8 x = __builtin_convertvector(p, d8) - __builtin_convertvector(q, d8);
        const d8 y = __builtin_convertvector(r, d8) - __builtin_convertvector(s, d8);
        low += x * x;
        high += y * y;
    }
    double rest = 0;
    for (; i < d; ++i) {
        const double x = static_cast<double>(a[i]) - static_cast<double>(b[i]);
        rest += x * x;
    }
    const d8 sum = low + high;
    return (((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]))) + rest;
}

FASTDP_BODY int32_t largest_portable(const float *row, int64_t d) {
    i16 most = {};
    int64_t i = 0;
    for (; i + kLanes <= d; i += kLanes) {
        i16 x;
        std::memcpy(&x, row + i, sizeof x);
        x &= 0x7fffffff;
        most = x > most ? x : most;
    }
    int32_t result = 0;
    for (int k = 0; k < kLanes; ++k) result = most[k] > result ? most[k] : result;
    for (; i < d; ++i) {
        int32_t x;
        std::memcpy(&x, row + i, sizeof x);
        x &= 0x7fffffff;
        result = x > result ? x : result;
    }
    return result;
}

#if FASTDP_HAS_X86
FASTDP_AVX512 double distance_avx512(const float *a, const float *b, int64_t d) { return distance_portable(a, b, d); }
FASTDP_AVX2 double distance_avx2(const float *a, const float *b, int64_t d) { return distance_portable(a, b, d); }
FASTDP_AVX512 int32_t largest_avx512(const float *row, int64_t d) { return largest_portable(row, d); }
FASTDP_AVX2 int32_t largest_avx2(const float *row, int64_t d) { return largest_portable(row, d); }
#endif

}  // namespace

double squared_distance(const float *a, const float *b, int64_t d) { return FASTDP_BEST(distance)(a, b, d); }

int32_t largest_bits(const float *row, int64_t d) { return FASTDP_BEST(largest)(row, d); }

}  // namespace fastdp
