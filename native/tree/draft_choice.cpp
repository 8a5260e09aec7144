#include "tree/draft_choice.hpp"

#include <algorithm>
#include <vector>

namespace seer {

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
    struct Gain {
        double tokens;
        size_t at;
        bool operator<(const Gain& other) const { return tokens > other.tokens || (tokens == other.tokens && at < other.at); }
    };
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
    std::sort(gains.begin(), gains.end());
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
