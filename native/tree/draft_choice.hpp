// The loops of common/policy/draft_budget.py: how likely drafts are accepted, which to verify, and counts.
//
// Invariants (tests/property/test_draft_loops.py asserts them, and the choices of the same lines in numpy):
// - a draft is cut at its end only; of equal gains the earlier draft's counts first, then the earlier
//   token's;
// - sums run in falling order of gains, so the same step has the same choice on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace seer {

// `n` drafts of at most `width` tokens; all arrays are [n] or [n, width], row by row.
struct Drafts {
    size_t n, width;
    const float* scores;
    const int32_t* lengths;
    const int64_t* slots;  // rows of the rates' table
};

// Acceptance rates [slots, cells]: a token's cell is the first one of its place (`bases` [width]) plus the
// number of `edges` that its score reaches.
struct Rates {
    std::span<const float> edges;
    const int64_t* bases;
    const double* table;
    size_t cells;
};

// Fill cells[n, width] and chances[n, width]: that a token and all before it are accepted, 0 past the end.
void rate_drafts(const Drafts& drafts, const Rates& rates, int32_t* cells, double* chances);

// Fill keep[n] with how many tokens of each draft to verify. `chances` [n, width]
// fall along a draft; seconds[k], k = 0 to n x width, are the step's with k drafted tokens; `others` are
// the tokens of requests without drafts; weights[n] may be null: 1 each.
void choose_drafts(std::span<const double> chances, size_t width, const double* weights, const double* seconds,
                      double others, double price, std::span<int32_t> keep);

// A tally counts [slots, 2, cells] tokens: verified, accepted.
struct Tally {
    int64_t* counts;
    size_t cells;
    void add(int64_t slot, int32_t cell, bool right) const {
        int64_t* verified = counts + static_cast<size_t>(slot) * 2 * cells + static_cast<size_t>(cell);
        ++verified[0];
        verified[cells] += right;
    }
};

}  // namespace seer
