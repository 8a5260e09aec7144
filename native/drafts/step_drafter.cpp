#include "drafts/step_drafter.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <numeric>
#include <thread>

#include "tree/context_drafter.hpp"

namespace seer {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::microseconds kSpin{10};      // before a step sleeps
constexpr std::chrono::microseconds kNextLook{50};  // of a feed, whether the step is through: it takes 1 to 500
constexpr size_t kReserve = 1 << 20;                // tokens at most, whatever a limit says

int64_t since(Clock::time_point begun) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begun).count();
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A request in a tree (null: none): `fresh` follows its first `previous` tokens. Request -1 appends nothing.
struct Said {
    GroupTree* tree;
    int64_t request, previous;
    std::span<const int32_t> fresh;
};

float expected(std::span<const float> scores) { return std::accumulate(scores.begin(), scores.end(), 0.0F); }

// Appends to both trees, and writes a draft of what follows `context`: that of the group's tree, or the common
// tree's if more of it is expected to be accepted, by the sum of scores. The common tree is left alone if its request
// is -1. Returns how many tokens; throws as GroupTree::append.
uint32_t append_and_draft(const Said& group, const Said& common, std::span<const int32_t> context,
                          const DraftOptions& options, const DraftView& out) {
    uint32_t count = 0;
    if (group.tree != nullptr) {
        if (group.request >= 0) group.tree->append(group.request, group.previous, group.fresh);
        count = group.tree->draft(context, group.request, options, out);
    }
    if (common.tree == nullptr || common.request < 0) return count;
    common.tree->append(common.request, common.previous, common.fresh);
    if (options.max_tokens == 0) return count;
    std::array<int32_t, ContextDrafter::kMaxTokens> token_ids, parents;
    std::array<float, ContextDrafter::kMaxTokens> scores;
    const uint32_t others = common.tree->draft(context, common.request, options, {token_ids, parents, scores});
    if (expected({scores.data(), others}) <= expected(out.scores.first(count))) return count;
    std::copy_n(token_ids.begin(), others, out.token_ids.begin());
    std::copy_n(scores.begin(), others, out.scores.begin());
    if (!out.parents.empty()) std::copy_n(parents.begin(), others, out.parents.begin());
    return others;
}

// How many tokens are left of a path without a placeholder, and without what follows a stop id (stop_ids: sorted).
uint32_t cut(std::span<const int32_t> path, std::span<const int32_t> stop_ids, int32_t placeholder) {
    for (uint32_t i = 0; i < path.size(); ++i) {
        if (path[i] == placeholder) return i;
        if (std::ranges::binary_search(stop_ids, path[i])) return i + 1;
    }
    return static_cast<uint32_t>(path.size());
}

// The same for a tree: parents come before their children.
uint32_t cut_tree(const DraftView& tree, uint32_t count, std::span<const int32_t> stop_ids, int32_t placeholder) {
    std::array<int32_t, ContextDrafter::kMaxTokens> moved;  // old places to new ones
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; ++i) {
        const int32_t token = tree.token_ids[i], old = tree.parents[i], parent = old < 0 ? -1 : moved[static_cast<size_t>(old)];
        const bool goes_on = old < 0 || (parent >= 0 && !std::ranges::binary_search(stop_ids, tree.token_ids[static_cast<size_t>(parent)]));
        moved[i] = -1;
        if (!goes_on || token == placeholder) continue;
        moved[i] = static_cast<int32_t>(kept);
        tree.token_ids[kept] = token;
        tree.parents[kept] = parent;
        tree.scores[kept] = tree.scores[i];
        ++kept;
    }
    return kept;
}

// Writes a tree's paths one after the other, of `places` each and with one between them; what is no token is left.
void flatten(const DraftView& tree, uint32_t count, size_t places, size_t paths, const DraftView& out) {
    std::array<int32_t, ContextDrafter::kMaxTokens + 1> best;  // child of each token, of the root last
    best.fill(-1);
    const auto below = [&](int32_t token) -> int32_t& { return token < 0 ? best.back() : best[static_cast<size_t>(token)]; };
    for (uint32_t i = 0; i < count; ++i)
        if (int32_t& child = below(tree.parents[i]); child < 0) child = static_cast<int32_t>(i);
    int32_t first = -1;
    while (below(first) >= 0) first = below(first);
    size_t path = 0;
    const auto write = [&](int32_t leaf) {
        size_t depth = 0;
        for (int32_t at = leaf; at >= 0; at = tree.parents[static_cast<size_t>(at)]) ++depth;
        const size_t begin = path++ * (places + 1);
        for (int32_t at = leaf; at >= 0; at = tree.parents[static_cast<size_t>(at)]) {
            --depth;
            out.token_ids[begin + depth] = tree.token_ids[static_cast<size_t>(at)];
            out.scores[begin + depth] = tree.scores[static_cast<size_t>(at)];
        }
    };
    if (first >= 0) write(first);
    for (int32_t i = 0; i < static_cast<int32_t>(count) && path < paths; ++i)
        if (below(i) < 0 && i != first) write(i);
}

}  // namespace

void run_step(void* step) noexcept {
    const auto& launched = *static_cast<const Step*>(step);
    launched.drafter->step(launched);
}

// Runs what changes slots or trees while no step runs or waits.
template <class Action>
auto StepDrafter::between_steps(Action&& action) {
    for (;; std::this_thread::sleep_for(kNextLook)) {
        const std::unique_lock lock(mutex_);
        if (steps_ == 0) return action();
    }
}

void StepDrafter::feed(GroupTree& tree, int64_t request, int64_t previous, std::span<const int32_t> tokens) {
    size_t at = 0;
    // Each append walks back to `previous`: known tokens are skipped at once.
    if (tokens.size() > kPiece) at = between_steps([&] { return tree.known(request, previous, tokens); });
    do {
        const auto piece = tokens.subspan(at, std::min(kPiece, tokens.size() - at));
        between_steps([&] { tree.append(request, previous + static_cast<int64_t>(at), piece); });
        at += piece.size();
    } while (at < tokens.size());
}

// Feeds an output to a tree that a request is in; returns how many tokens need not be shown to it again.
size_t StepDrafter::teach(GroupTree* tree, int64_t request, std::span<const int32_t> output) {
    if (tree == nullptr || request < 0 || output.empty()) return output.size();
    try {
        feed(*tree, request, 0, output);
        return output.size();
    } catch (const std::exception&) {
        ++refused_;
        return 0;
    }
}

int64_t StepDrafter::set(size_t at, const SlotRequest& request, std::shared_ptr<GroupTree>& before) {
    Slot slot;
    slot.tree = request.tree;
    slot.index = request.index;
    slot.common_name = request.common_name;
    slot.prompt = std::min<size_t>(request.prompt_length, kMaxContext);
    slot.end = request.limit - 1 - static_cast<int64_t>(request.prompt_length);
    slot.stop_ids = request.stop_ids;
    std::ranges::sort(slot.stop_ids);
    slot.placeholder = request.placeholder;
    const auto kept = request.tokens.subspan(request.prompt_length - slot.prompt);
    const size_t end = static_cast<size_t>(std::max<int64_t>(slot.end, 0));
    const size_t most = slot.prompt + end + 2 * ContextDrafter::kMaxTokens;
    slot.tokens.reserve(std::max(kept.size(), std::min(most, kReserve)));  // so that no step has to
    slot.tokens.assign(kept.begin(), kept.end());
    const auto output = slot.output();
    slot.told = output.size();
    if (slot.tree && !slot.tree->full()) slot.told = teach(slot.tree.get(), slot.index, output);
    const std::shared_ptr<GroupTree> common = between_steps([this] { return common_; });
    slot.told = std::min(slot.told, teach(common.get(), slot.common_name, output));
    return between_steps([&] {
        slot.generation = ++generations_;
        if (common != common_) slot.told = 0;
        std::swap(slots_[at], slot);
        before = std::move(slot.tree);
        return generations_;
    });
}

void StepDrafter::clear(size_t at, std::shared_ptr<GroupTree>& before) {
    Slot slot;
    between_steps([&] { std::swap(slots_[at], slot); });
    before = std::move(slot.tree);
}

void StepDrafter::use_common(std::shared_ptr<GroupTree>& tree) {
    struct Taught {
        int64_t generation = 0;
        size_t tokens = 0;
    };
    std::vector<Taught> taught(slots_.size());
    std::vector<int32_t> output;
    for (size_t i = 0; tree && i < slots_.size(); ++i) {
        const int64_t name = between_steps([&] {
            const Slot& slot = slots_[i];
            output.assign(slot.output().begin(), slot.output().end());
            taught[i].generation = slot.generation;
            return slot.common_name;
        });
        taught[i].tokens = teach(tree.get(), name, output);
    }
    between_steps([&] {
        std::swap(common_, tree);
        if (!common_) return;
        for (size_t i = 0; i < slots_.size(); ++i)
            slots_[i].told = slots_[i].generation == taught[i].generation ? std::min(slots_[i].told, taught[i].tokens) : 0;
    });
}

// Spins first: most pieces take less time than to fall asleep and wake. Then sleeps, as who has the mutex may need this
// core; by the system's clock, as GCC's TSan knows no other wait with a deadline.
bool StepDrafter::lock_in_time(std::unique_lock<std::timed_mutex>& lock) const {
    const auto begun = Clock::now();
    const auto spin = std::min<std::chrono::nanoseconds>(kSpin, patience_);
    while (!lock.try_lock()) {
        if (Clock::now() - begun >= spin) return lock.try_lock_until(std::chrono::system_clock::now() + (patience_ - spin));
        relax();
    }
    return true;
}

// Returns whether the step is to go without drafts.
bool StepDrafter::sleep_at_random() {
    const int64_t most = stall_;
    if (most <= 0) return false;
    dice_ = dice_ * 6364136223846793005U + 1442695040888963407U;
    const auto drawn = static_cast<int64_t>(dice_ >> 33);
    std::this_thread::sleep_for(std::chrono::nanoseconds(drawn % most));
    return drawn % 3 == 0;
}

void StepDrafter::step(const Step& step) noexcept {
    const std::unique_lock alone(one_step_);
    const auto begun = Clock::now();
    const bool stalled = sleep_at_random();
    ++steps_;
    std::unique_lock lock(mutex_, std::defer_lock);
    const bool in_time = !stalled && lock_in_time(lock);
    waited_ += since(begun);
    missed_ += !in_time;
    if (in_time) learn_late();
    for (size_t row = 0; row < step.n; ++row) {
        const int64_t drawn = std::clamp<int64_t>(step.num_sampled[row], 0, static_cast<int64_t>(step.width));
        const std::span sampled(step.sampled + row * step.width, static_cast<size_t>(drawn));
        const std::span tree = step.parents == nullptr ? std::span<int32_t>() : std::span(step.parents + row * step.k, step.k);
        const DraftView out{{step.drafts + row * step.k, step.k}, tree, {step.scores + row * step.k, step.k}};
        const int32_t last = drawn > 0 ? std::max(sampled.back(), 0) : 0;
        uint32_t count = 0;
        if (step.is_flat()) {  // before paths are written
            std::ranges::fill(out.token_ids, last);
            std::ranges::fill(out.scores, 0.0F);
        }
        if (drawn > 0) {
            Slot* slot = in_time ? slot_of(step.slots[row], step.generations[row]) : nullptr;
            if (slot != nullptr) count = draft(*slot, sampled, step, out);
            if (!in_time) late_.push_back({step.slots[row], step.generations[row], {sampled.begin(), sampled.end()}});
        }
        step.counts[row] = static_cast<int32_t>(count);
        if (step.is_flat()) continue;
        std::ranges::fill(out.token_ids.subspan(count), last);
        std::ranges::fill(out.scores.subspan(count), 0.0F);
    }
    --steps_;
    nanoseconds_ += since(begun);
}

// Adds to the outputs what rows drew in steps that went without drafts; trees are given it with the next draft.
void StepDrafter::learn_late() {
    for (const Late& late : late_)
        if (Slot* slot = slot_of(late.slot, late.generation))
            slot->tokens.insert(slot->tokens.end(), late.tokens.begin(), late.tokens.end());
    late_.clear();
}

StepDrafter::Slot* StepDrafter::slot_of(int32_t at, int64_t generation) {
    if (at < 0 || static_cast<size_t>(at) >= slots_.size()) return nullptr;
    Slot& slot = slots_[static_cast<size_t>(at)];
    return slot.generation > 0 && slot.generation == generation ? &slot : nullptr;
}

uint32_t StepDrafter::draft(Slot& slot, std::span<const int32_t> sampled, const Step& step, const DraftView& out) {
    try {
        slot.tokens.insert(slot.tokens.end(), sampled.begin(), sampled.end());
        if (!slot.judged) slot.learns = slot.tree && !slot.tree->full();
        slot.judged = true;
        const auto output = slot.output();
        const auto room = static_cast<size_t>(std::max<int64_t>(slot.end - static_cast<int64_t>(output.size()), 0));
        DraftOptions options{};
        options.top_k = static_cast<uint32_t>(step.paths);
        const size_t depth = std::min(room, step.is_flat() ? step.places() : step.k);
        options.max_depth = static_cast<uint32_t>(std::min(depth, size_t{ContextDrafter::kMaxTokens}));
        options.max_tokens = static_cast<uint32_t>(std::min(step.is_flat() ? depth * step.paths : depth, size_t{ContextDrafter::kMaxTokens}));
        const auto told = static_cast<int64_t>(slot.told);
        const auto fresh = output.subspan(slot.told);
        const Said group{slot.tree.get(), slot.learns ? slot.index : -1, told, fresh};
        const Said common{common_.get(), slot.common_name, told, fresh};
        std::array<int32_t, ContextDrafter::kMaxTokens> token_ids, parents;
        std::array<float, ContextDrafter::kMaxTokens> scores;
        const DraftView view = step.is_flat() ? DraftView{token_ids, parents, scores} : out;
        const uint32_t count = append_and_draft(group, common, slot.tokens, options, view);
        slot.told = output.size();
        if (view.parents.empty()) return cut(out.token_ids.first(count), slot.stop_ids, slot.placeholder);
        const uint32_t kept = cut_tree(view, count, slot.stop_ids, slot.placeholder);
        if (step.is_flat()) flatten(view, kept, step.places(), step.paths, out);
        return kept;
    } catch (const std::exception&) {  // the tree is full, or another attempt of the request is in it
        ++refused_;
        slot.told = 0;
        slot.judged = false;
        return 0;
    }
}

}  // namespace seer
