#include "tree/draft_choice.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <numeric>
#include <vector>

namespace seer {
namespace {

struct Gain {
    double tokens;  // positive
    size_t at;
};

// Puts the greatest gain first; equal ones keep their order. A radix sort: comparisons of thousands of gains
// mispredict half of the time, and take four times as long.
void sort_falling(std::vector<Gain>& gains) {
    constexpr size_t kBits = 8, kDigits = 64 / kBits, kValues = 1 << kBits;
    const auto digit = [](const Gain& gain, size_t place) {
        return ~std::bit_cast<uint64_t>(gain.tokens) >> place * kBits & (kValues - 1);  // positive doubles rise as their bits
    };
    std::array<std::array<uint32_t, kValues>, kDigits> counts{};
    for (const Gain& gain : gains)
        for (size_t place = 0; place < kDigits; ++place) ++counts[place][digit(gain, place)];
    std::vector<Gain> sorted(gains.size());
    for (size_t place = 0; place < kDigits; ++place) {
        std::array<uint32_t, kValues>& starts = counts[place];
        if (gains.empty() || starts[digit(gains[0], place)] == gains.size()) continue;  // all have the same
        std::exclusive_scan(starts.begin(), starts.end(), starts.begin(), uint32_t{0});
        for (const Gain& gain : gains) sorted[starts[digit(gain, place)]++] = gain;
        gains.swap(sorted);
    }
}

}  // namespace

void rate_drafts(const Drafts& drafts, const Rates& rates, int32_t* cells, double* chances) {
    for (size_t row = 0; row < drafts.n; ++row) {
        const double* known = rates.table + static_cast<size_t>(drafts.slots[row]) * rates.cells;
        double chance = 1.0;
        for (size_t k = 0; k < drafts.width; ++k) {
            const size_t at = row * drafts.width + k;
            int64_t cell = rates.bases[k];
            for (const float edge : rates.edges) cell += drafts.scores[at] >= edge;
            cells[at] = static_cast<int32_t>(cell);
            chance = static_cast<int64_t>(k) < drafts.lengths[row] ? std::min(chance, known[cell]) : 0.0;
            chances[at] = chance;
        }
    }
}

void choose_drafts(std::span<const double> chances, size_t width, const double* weights, const double* seconds,
                      double others, double price, std::span<int32_t> keep) {
    std::vector<Gain> gains;
    gains.reserve(chances.size());
    double tokens = 0.0;
    for (size_t row = 0; row < keep.size(); ++row) {
        const double weight = weights == nullptr ? 1.0 : weights[row];
        tokens += weight;
        keep[row] = 0;
        for (size_t at = row * width; at < (row + 1) * width && chances[at] > 0.0; ++at)
            gains.push_back({chances[at] * weight, at});
    }
    sort_falling(gains);
    tokens += others;
    double sum = tokens, rate = tokens / seconds[0];
    for (size_t k = 0; k < gains.size(); ++k) rate = std::max(rate, (sum += gains[k].tokens) / seconds[k + 1]);
    const double worth = price * rate;
    double most = tokens - worth * seconds[0];
    size_t taken = 0;
    for (size_t k = 0; k < gains.size(); ++k) {
        tokens += gains[k].tokens;
        const double net = tokens - worth * seconds[k + 1];
        if (net > most) most = net, taken = k + 1;
    }
    for (size_t k = 0; k < taken; ++k) ++keep[gains[k].at / width];
}

}  // namespace seer
