// The loops over a whole row, one table of them per instruction set.
//
// Invariants:
// - rows are cut into blocks of kBlock tokens, the last one padded with -inf;
// - scan, scale and noise_argmax give the bits of the scalar code in noise.hpp;
// - exp_sum and bounds are approximate (relative 1e-6) and never decide a token.
#pragma once

#include <cstdint>
#include <limits>

namespace seer {

inline constexpr int kBlock = 32;   // tokens per block: eight Philox counters
inline constexpr int kBins = 1024;  // of the top-p histogram
inline constexpr float kInf = std::numeric_limits<float>::infinity();

inline int32_t block_count(int32_t vocab) { return (vocab + kBlock - 1) / kBlock; }

// Logits x[vocab] and what scan and bounds found out about them.
struct Row {
    const float* x;
    int32_t vocab;
    const float* block_max;  // [block_count(vocab)]
    float max;               // the largest of block_max
    const float* bound;      // [block_count(vocab)] exp((block_max - max) / temperature)
};

// The lowest token of the row's maximum, which must be finite.
inline int32_t first_max(const Row& row) {
    int32_t token = 0;
    while (row.block_max[token / kBlock] != row.max) token += kBlock;
    while (row.x[token] != row.max) ++token;
    return token;
}

struct Scan {
    float max;
    bool has_nan;
};

struct Draw {
    uint64_t key;
    int64_t position;
    float temperature;  // > 0; the row is divided by it
    float keep;         // tokens whose divided logit is below are out; -inf keeps all
};

// Which tokens of a row take part in a selection: x >= floor, and bin(x) == bin where asked.
struct Zone {
    float floor;     // finite
    float bin_scale; // bins per unit of (max - x); 0 puts all into bin 0
    int32_t bin;
};

struct Kernels {
    // Fill block_max[block_count(vocab)]; max ignores NaN.
    Scan (*scan)(const float* x, int32_t vocab, float* block_max);
    // bound[b] = exp((block_max[b] - max) / temperature) for b < blocks, rounded up to a multiple of 8.
    void (*bounds)(const float* block_max, int32_t blocks, float max, float temperature, float* bound);
    // Sum of exp((x - max) / temperature) over x >= keep.
    double (*exp_sum)(const Row& row, float temperature, float keep);
    // out[i] = x[i] / temperature.
    void (*scale)(const float* x, int32_t vocab, float temperature, float* out);
    // The token of the specification: argmax of x / temperature + noise over x / temperature >= keep.
    int32_t (*noise_argmax)(const Row& row, const Draw& draw);
    // mass[bin] += top-p weight of every token of the zone (zone.bin is ignored).
    void (*histogram)(const Row& row, const Zone& zone, int64_t* mass);
    // Write the zone's logits to out (room for vocab + kBlock), in order; return how many.
    int32_t (*gather)(const Row& row, const Zone& zone, float* out);
};

// The fastest table this processor can run.
const Kernels& kernels();
// Name of that instruction set, for bench reports.
const char* kernels_name();

}  // namespace seer
