// Top-k and top-p cuts without sorting the row.
//
// Invariants:
// - a cut is a value: the survivors are the tokens at or above it, so ties live or die together;
// - it depends on the multiset of values only, not on their order (masses are integers).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sampler/simd_kernels.hpp"

namespace seer {

// A value with the mass it contributes: 1 for top-k, its weight for top-p.
struct Item {
    uint32_t image;  // order-preserving image of the float
    uint32_t mass;
};

// Buffers reused from row to row.
struct SelectScratch {
    std::vector<float> values;
    std::vector<Item> items;
    std::vector<int64_t> bins;
};

// The k-th largest logit of the row among those >= keep; keep itself when fewer are.
float top_k_cut(const Row& row, int32_t k, float keep, SelectScratch& scratch);

// The largest value v such that the tokens >= v hold ceil(top_p * total) of the weight that the
// tokens >= keep hold in total. See top_p_weight in noise.hpp; 0 < top_p < 1.
float top_p_cut(const Row& row, double top_p, float keep, SelectScratch& scratch);

}  // namespace seer
