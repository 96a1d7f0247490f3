// Bounds of the weights of sixteen rows of a table: the inner loops of the exponential mechanism.
#pragma once
#include <cstdint>

#include "snap.h"

namespace fastdp {

constexpr int kIdsAtOnce = 12;
constexpr int kGroupsAtOnce = 2;

// A row rounded to step * code, codes in -127 .. 127, in units of the table's scale.
struct EightBits {
    float step;
    float square;  // of the norm of step * code
    float lost;    // upper bound of the norm of what was rounded away
};

// Of a group of sixteen rows.
struct GroupTerms {
    float step[kLanes], square[kLanes], lost[kLanes];
    float slope[kLanes];  // c_w, rounded down
    float prior[kLanes];  // log pi_w, rounded up; minus infinity for rows past the table's end
};

// Of a law: its token's rounded row, its scale and cap in units of the table's scale.
struct LawTerms {
    float step, square, lost;
    int32_t bias;  // 128 times the sum of the codes: the table's codes are stored with 128 added
    float scale, cap;
};

struct ExponentialKernels {
    // Writes the codes plus 128 of row `row` minus `centre`: code i at to[i / 4 * 64 + i % 4].
    EightBits (*round)(const float *row, const float *centre, int64_t d, float scale, uint8_t *to);
    // dots[(k * 2 + h) * 16 + lane] = sum over 4 * quads entries of left[k] times row `lane` of group h, 128 still added.
    void (*dots)(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads, int32_t *dots);
    // The same for one row and one group.
    void (*one)(const int8_t *left, const uint8_t *group, int64_t quads, int32_t *dots);
    // The largest upper bound of a log weight of the group, and the sum of the bounds relative to it.
    void (*sum)(const LawTerms &law, const GroupTerms &group, const int32_t *dots, float &top, float &sum);
    // The sixteen bounds, relative to the largest.
    void (*weigh)(const LawTerms &law, const GroupTerms &group, const int32_t *dots, float *weights);
    // bounds[g] >= exp(tops[g] - top) * sums[g]; room for 16 more.
    void (*weights)(const float *tops, const float *sums, float top, int64_t n, float *bounds);
};

const ExponentialKernels &exponential_kernels();

}  // namespace fastdp
