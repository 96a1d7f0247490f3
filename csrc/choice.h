// Bounds of the weights of the rows of a table: the inner loops of the exponential mechanism. A law is the distribution
// from which one token's replacement is drawn, over all rows.
//
// A bound is kept as its level, one byte: level k is the float whose bits are k << 21. These lie on the chords between powers
// of two, so level k is at least 2^(k / 4 - 127), and a logarithm rounded up to a level is an upper bound.
#pragma once
#include <cstdint>

#include "snap.h"

namespace fastdp {

constexpr int kGroupsAtOnce = 2;                     // groups of sixteen rows multiplied at a time
constexpr int kIdsATile = 32;                        // ids multiplied at a time by a matrix unit, the most of any kernel
constexpr int kBlockGroups = 16;                     // groups whose levels lie together
constexpr int64_t kBlockRowsOfTable = kBlockGroups * kLanes;
constexpr int kLeastLevel = 4;                       // of a row that may be drawn; 0 is a weight of 0
constexpr int kTopLevel = 248;                       // of the largest weight of a law
constexpr int kLevelsADoubling = 4;
constexpr int kLevelShift = 21;

// A row rounded to step * code, codes in -127 .. 127, in units of the table's scale.
struct EightBits {
    float step;
    float square;  // of the norm of step * code
    float lost;    // upper bound of the norm of what was rounded away
};

// A group of sixteen rows of the table.
struct GroupTerms {
    float step[kLanes];    // twice the row's
    float square[kLanes];  // lowered by what float32 may lose in a squared distance
    float lost[kLanes];
    float prior[kLanes];  // of log pi_w, less the largest of them, in levels and rounded up; minus infinity where it is
    float least[kLanes];  // kLeastLevel, or 0 for rows that are never drawn
};

// One law: its token's rounded row, and its scale and cap in units of the table's scale.
struct LawTerms {
    int64_t id;
    float step, square, lost;
    int32_t bias;  // 128 times the sum of the codes: the table's codes are stored with 128 added
    float scale;   // in levels for a unit of distance
    float cap;
    float start;  // level at distance 0 of the row with the largest prior, and nearly 1 to round up
};

struct ChoiceKernels {
    int ids_at_once;
    // Around calls of `dots` by one thread.
    void (*enter)();
    void (*leave)();
    // Writes the codes plus 128 of row `row` minus `centre`: code i at to[i / 4 * 64 + i % 4].
    EightBits (*round)(const float *row, const float *centre, int64_t d, float scale, uint8_t *to);
    // Puts the 4 * quads codes of row k where `dots` looks for them; quads is a multiple of 16, `left` one of ids_at_once rows.
    void (*place)(const int8_t *code, int64_t k, int64_t quads, int8_t *left);
    // dots[(k * 2 + h) * 16 + lane] = product of row k of `left` and row `lane` of group h, 128 still added, k < ids_at_once.
    void (*dots)(const int8_t *left, const uint8_t *group0, const uint8_t *group1, int64_t quads, int32_t *dots);
    // The same for the codes of one row and one group.
    void (*one)(const int8_t *code, const uint8_t *group, int64_t quads, int32_t *dots);
    // The levels of two groups for `count` laws, law l by the products of row owner[l] - first: levels[l * 256 + h * 16 + lane];
    // adds the weights to sums[l * 16 + lane].
    using Weigh = void(const LawTerms *laws, const int64_t *owner, int64_t first, int64_t count, const GroupTerms *groups,
                       const int32_t *dots, uint8_t *levels, float *sums);
    Weigh *weigh;
    Weigh *weigh_plain;  // for groups whose priors are 0 and rows all drawn, and laws without a cap
    // The highest level of a group, neither rounded up nor held below 256.
    float (*top)(const LawTerms &law, const GroupTerms &group, const int32_t *dots);
    // Of the 256 levels of a block, the sums of the weights that share a lane: cells[lane].
    void (*cells)(const uint8_t *levels, float *cells);
    // The sum of sixteen floats for each law.
    void (*fold)(const float *sums, int64_t laws, double *masses, int64_t stride);
};

const ChoiceKernels &choice_kernels();

}  // namespace fastdp
