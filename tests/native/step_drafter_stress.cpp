// The step drafter under sanitizers: `make sanitize` builds this twice and runs it.
//
// First one thread: what a step writes, in arrays of exactly the sizes that they are said to have. Then a thread that
// steps, two that feed siblings, one that gives slots to others and takes them, and changes the common tree: no
// sampled token may be lost, and the sanitizers see every access that a lock does not order.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "drafts/step_drafter.hpp"

namespace {

using seer::GroupTree;
using seer::StepDrafter;
using Stream = std::vector<int32_t>;
using Tree = std::shared_ptr<GroupTree>;

constexpr size_t kSlots = 8, kKept = 2;  // the kept ones do not change hands
constexpr int32_t kStop = 7, kPlaceholder = 11;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

uint32_t below(std::mt19937& random, uint32_t limit) { return static_cast<uint32_t>(random()) % limit; }

// A part of one song, with a token now and then that is not in it.
Stream some_tokens(std::mt19937& random, uint32_t most) {
    Stream tokens(below(random, most) + 1);
    const uint32_t start = below(random, 40);
    for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(below(random, 30) == 0 ? below(random, 1000) : (start + i) % 40);
    return tokens;
}

Tree new_tree(size_t max_bytes = size_t{1} << 30) { return std::make_shared<GroupTree>(Stream{1, 2, 3}, max_bytes); }

int64_t set(StepDrafter& drafter, size_t slot, Tree tree, int64_t index, const Stream& output, int64_t room) {
    Stream tokens{1, 2, 3};
    tokens.insert(tokens.end(), output.begin(), output.end());
    Tree before;
    return drafter.set(slot, {std::move(tree), index, index, 3, tokens, static_cast<int64_t>(tokens.size()) + room, {kStop}, kPlaceholder}, before);
}

// One step of some rows; `fed` [slots] counts the tokens that those in it drew.
void one_step(StepDrafter& drafter, std::mt19937& random, const std::vector<int64_t>& generations, std::vector<int64_t>& fed) {
    const size_t n = below(random, kSlots + 1), paths = below(random, 3) + 1, width = 9;
    const bool tree = below(random, 2) > 0;
    const size_t each = below(random, 9), k = tree || each == 0 ? each : paths * each + paths - 1;
    std::vector<int32_t> slots(kSlots), sampled, num_sampled(n), drafts(n * k, -1), counts(n, -1);
    std::vector<int64_t> named(n);
    std::vector<float> scores(n * k, -1.0f);
    for (size_t i = 0; i < kSlots; ++i) slots[i] = static_cast<int32_t>(i);
    std::ranges::shuffle(slots, random);
    slots.resize(n);
    for (size_t row = 0; row < n; ++row) {
        Stream tokens = below(random, 8) == 0 ? Stream{} : some_tokens(random, 9);
        num_sampled[row] = static_cast<int32_t>(tokens.size());
        fed[static_cast<size_t>(slots[row])] += num_sampled[row];
        named[row] = generations[static_cast<size_t>(slots[row])];
        tokens.resize(width, -1);
        sampled.insert(sampled.end(), tokens.begin(), tokens.end());
    }
    std::vector<int32_t> parents(n * k, -2);
    seer::Step step{&drafter, n, width, k, slots.data(), named.data(), sampled.data(), num_sampled.data(),
                    drafts.data(), counts.data(), scores.data(), paths, tree ? parents.data() : nullptr};
    seer::run_step(&step);
    for (size_t row = 0; row < n; ++row) {
        require(counts[row] >= 0 && static_cast<size_t>(counts[row]) <= k, "a draft has at most k tokens");
        require(num_sampled[row] > 0 || counts[row] == 0, "a row that drew nothing drafts nothing");
        const int32_t last = num_sampled[row] > 0 ? sampled[row * width + static_cast<size_t>(num_sampled[row]) - 1] : 0;
        int32_t drafted = 0;
        for (size_t i = 0; i < k; ++i) {
            const size_t at = row * k + i, length = step.is_flat() ? step.places() : k;
            const bool is_drafted = scores[at] > 0.0f, goes_on = i % (length + 1) > 0 && scores[at - 1] > 0.0f;
            drafted += is_drafted;
            require(drafts[at] >= 0, "every place has a token");
            require(is_drafted || (scores[at] == 0.0f && drafts[at] == last), "empty places have the row's last token");
            require(!is_drafted || drafts[at] != kPlaceholder, "placeholders are not drafted");
            require(!is_drafted || !step.is_flat() || i % (length + 1) < length, "nothing is drafted between paths");
            if (step.parents == nullptr) require(!is_drafted || !goes_on || drafts[at - 1] != kStop, "nothing is drafted after a stop id");
            else if (is_drafted) require(parents[at] >= -1 && parents[at] < static_cast<int32_t>(i), "parents come first");
        }
        require(step.is_flat() ? drafted >= counts[row] : drafted == counts[row], "as many tokens are drafted as it says");
    }
}

void one_thread(uint32_t seed) {
    std::mt19937 random(seed);
    StepDrafter drafter(kSlots, std::chrono::seconds(10));
    const std::vector<Tree> trees{new_tree(), new_tree(20'000), nullptr};
    std::vector<int64_t> generations(kSlots, 0), fed(kSlots);
    for (int i = 0; i < 2000; ++i) {
        const size_t slot = below(random, kSlots);
        switch (below(random, 20)) {
            case 0:
                generations[slot] = set(drafter, slot, trees[below(random, 3)], below(random, 30), some_tokens(random, 300), below(random, 60));
                break;
            case 1: {
                Tree before;
                drafter.clear(slot, before);
                break;
            }
            case 2: {
                Tree common = below(random, 3) > 0 ? new_tree(below(random, 2) > 0 ? 5'000 : size_t{1} << 30) : nullptr;
                drafter.use_common(common);
                break;
            }
            case 3:
                try {
                    drafter.feed(*trees[below(random, 2)], below(random, 60), 0, some_tokens(random, 500));
                } catch (const std::length_error&) {  // the small one is full
                }
                break;
            default: one_step(drafter, random, generations, fed);
        }
    }
    require(drafter.refused() > 0, "the small tree became full");
}

void many_threads(std::chrono::microseconds patience) {
    constexpr int kSteps = 700;
    constexpr int64_t kIndex = 1000;  // of what the kept slots run
    StepDrafter drafter(kSlots, patience);
    const std::vector<Tree> trees{new_tree(), new_tree()};
    std::vector<int64_t> fed(kSlots);
    std::array<std::atomic<int64_t>, kSlots> generations{};
    for (size_t slot = 0; slot < kKept; ++slot)
        generations[slot] = set(drafter, slot, trees[slot], kIndex + static_cast<int64_t>(slot), {}, 1'000'000);
    std::atomic<bool> over = false;
    std::atomic<int> fed_times = 0, set_times = 0;
    std::vector<std::thread> threads;
    for (int feeder = 0; feeder < 2; ++feeder)
        threads.emplace_back([&, feeder] {
            std::mt19937 random(static_cast<uint32_t>(feeder));
            std::vector<Stream> streams(8);
            while (!over) {
                const size_t at = below(random, 8);
                const Stream tokens = some_tokens(random, 200);
                GroupTree& tree = *trees[at % 2];
                const auto previous = static_cast<int64_t>(streams[at].size());
                streams[at].insert(streams[at].end(), tokens.begin(), tokens.end());
                const int64_t request = feeder * 8 + static_cast<int64_t>(at);
                if (below(random, 4) == 0) tree.append(request, previous, tokens);  // safe as well, if not polite
                else drafter.feed(tree, request, previous, tokens);
                require(tree.length(request) == static_cast<int64_t>(streams[at].size()), "a feed is there when it returns");
                ++fed_times;
            }
        });
    threads.emplace_back([&] {
        std::mt19937 random(10);
        for (int64_t index = 2000; !over; ++index, ++set_times) {
            const size_t slot = kKept + below(random, kSlots - kKept);
            Tree other = below(random, 2) == 0 ? new_tree() : trees[below(random, 2)];
            if (below(random, 3) > 0) generations[slot] = set(drafter, slot, other, index, some_tokens(random, 100), below(random, 60));
            else drafter.clear(slot, other);
            if (below(random, 8) != 0) continue;
            Tree common = below(random, 3) > 0 ? new_tree() : nullptr;
            drafter.use_common(common);
        }
    });
    std::mt19937 random(20);
    for (int i = 0; i < kSteps || fed_times < 100 || set_times < 100; ++i) {
        one_step(drafter, random, {generations.begin(), generations.end()}, fed);
        require(drafter.waited() <= drafter.nanoseconds(), "a wait is part of its step");
        std::this_thread::sleep_for(std::chrono::microseconds(50));  // as an engine's forward pass
    }
    over = true;
    for (std::thread& thread : threads) thread.join();
    const int64_t missed = drafter.missed();
    const std::vector<int64_t> before = fed;
    while (fed[0] == before[0] || fed[1] == before[1]) one_step(drafter, random, {generations.begin(), generations.end()}, fed);
    require(drafter.missed() == missed, "steps that nobody disturbs have drafts");
    for (size_t slot = 0; slot < kKept; ++slot)
        require(trees[slot]->length(kIndex + static_cast<int64_t>(slot)) == fed[slot], "no sampled token is lost, whatever k is");
    require(drafter.refused() == 0, "nothing was refused");
    require(missed == 0 || patience < std::chrono::seconds(1), "feeds give way to a step that waits");
    std::printf("step drafter: patience %ld us, steps that went without drafts: %ld\n", static_cast<long>(patience.count()), static_cast<long>(missed));
}

}  // namespace

int main() {
    for (uint32_t seed = 0; seed < 4; ++seed) one_thread(seed);
    for (const int patience : {0, 100, 1'000'000}) many_threads(std::chrono::microseconds(patience));
    std::puts("step drafter: ok");
    return 0;
}
