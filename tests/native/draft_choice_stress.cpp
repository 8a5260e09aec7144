// The draft budget's loops under sanitizers: `make sanitize` builds and runs this.
//
// Arrays have exactly the sizes that they are said to have, so that a step past an end is seen. That the
// choices are right is tests/property/test_draft_loops.py's to say.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "tree/draft_choice.hpp"

namespace {

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

void one_step(std::mt19937& random) {
    constexpr size_t kSlots = 3, kCells = 27;
    const auto below = [&random](size_t limit) { return random() % limit; };
    const size_t n = below(40), width = below(9);
    const std::vector<float> edges{0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.6f, 0.7f, 0.8f};
    std::vector<float> scores(n * width);
    std::vector<int32_t> lengths(n), cells(n * width), keep(n);
    std::vector<int64_t> slots(n), bases(width), counts(kSlots * 2 * kCells);
    std::vector<double> table(kSlots * kCells), chances(n * width), weights(n, 2.0), seconds(n * width + 1, 0.01);
    for (float& score : scores) score = static_cast<float>(below(11)) / 10.0f;
    for (int32_t& length : lengths) length = static_cast<int32_t>(below(width + 3)) - 1;  // too short and too long, too
    for (int64_t& slot : slots) slot = static_cast<int64_t>(below(kSlots));
    for (int64_t& base : bases) base = static_cast<int64_t>(below(kCells - edges.size()));
    for (double& rate : table) rate = static_cast<double>(below(11)) / 10.0;
    for (double& step : seconds) step += static_cast<double>(below(100)) / 1000.0;
    seer::rate_drafts({n, width, scores.data(), lengths.data(), slots.data()}, {edges, bases.data(), table.data(), kCells},
                      cells.data(), chances.data());
    seer::choose_drafts(chances, width, below(2) ? weights.data() : nullptr, seconds.data(), 1.0, 1.15, keep);
    const seer::Tally tally{counts.data(), kCells};
    for (size_t row = 0; row < n; ++row) {
        require(keep[row] >= 0 && keep[row] <= std::max(lengths[row], 0), "no more is kept than was drafted");
        for (size_t k = 0; k < static_cast<size_t>(keep[row]); ++k) tally.add(slots[row], cells[row * width + k], true);
    }
}

}  // namespace

int main() {
    std::mt19937 random(0);
    for (int step = 0; step < 5000; ++step) one_step(random);
    std::puts("draft choice: ok");
    return 0;
}
