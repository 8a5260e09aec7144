// The drafts of a whole step from the tokens just drawn, for a CUDA callback or a thread of a gate to make: without
// the GIL, without a Python object, and without an exception.
//
// Invariants (tests/property/test_step_drafter.py and tests/native/step_drafter_stress.cpp assert them):
// - a row's draft ends within its chunk's limit, and has nothing after a stop id, and no placeholder;
//   the first of several paths is the one that there would be alone;
// - tokens go into a row's own output and its trees whatever k is, in the order of rows; a row that drew none
//   (unfinished prefill) teaches and drafts nothing;
// - what a tree refuses costs that row's draft of that step alone, and is counted; the next step shows the tree the
//   whole output again;
// - a row of a request that has lost its slot since the step was launched does nothing;
// - no feed, set or other step comes in between a step's rows; a step waits `patience` for its turn, and else goes
//   without drafts: its tokens are kept, and learnt by the next one.
//
// The lock: a mutex around slots and feeds, beside the one of each tree. A step marks itself as waiting first, and a
// feed that gets the mutex then gives it back, so that a step waits for one piece of one feed at most, whoever feeds. A
// piece is kPiece tokens: 2 to 30 us, 1 ms when the map of a tree of millions of tokens doubles. To find the tokens of
// a feed that are known takes 1 ns each. Patience is short for another reason: a thread that the operating system
// stops while it has the mutex may be back milliseconds later. Tokens that reach a tree otherwise, by its own `append`,
// are safe, but a step waits for all of them, without a deadline.
//
// Rows are not shared out to threads: on 2 cores a helper that sleeps gains nothing at 64 rows and a quarter of 400 us
// at 256, and one that spins stalls everything else. The common tree would need them in order, too.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tree/group_tree.hpp"

namespace seer {

class StepDrafter;

// One step's rows: `n` requests, by their slots. All arrays belong to the caller, and may be pinned memory that a GPU
// writes and reads. Of `sampled` [n, width] row i has its first num_sampled[i] tokens. Filled are `counts` [n], and
// `drafts` and `scores` [n, k]: behind the counts[i] tokens of a draft the last token drawn (0 if none was), and 0.
//
// A draft may fork into at most `paths` paths. With `parents` [n, k] it is written as a tree, see DraftView. Without,
// its paths lie one after the other, the one along every token's best child first: each has (k + 1) / paths - 1 places,
// with one between them, and what is not drafted is as above.
struct Step {
    StepDrafter* drafter;
    size_t n, width, k;
    const int32_t* slots;
    const int64_t* generations;  // what `set` returned for each row's request
    const int32_t* sampled;
    const int32_t* num_sampled;
    int32_t* drafts;
    int32_t* counts;
    float* scores;
    size_t paths = 1;
    int32_t* parents = nullptr;

    // Places of each path if paths lie one after the other.
    size_t places() const { return (k + 1) / paths - (k > 0); }
    bool is_flat() const { return paths > 1 && parents == nullptr; }
};

// For cuLaunchHostFunc: makes the drafts of a Step.
void run_step(void* step) noexcept;

// What a request has when it gets a slot.
struct SlotRequest {
    std::shared_ptr<GroupTree> tree;  // null: none
    int64_t index = -1;               // its name in the tree
    int64_t common_name = -1;         // and in the common tree; -1: it is not in there
    size_t prompt_length = 0;
    std::span<const int32_t> tokens;  // the prompt and the output so far
    int64_t limit = 0;                // tokens of the chunk at most, prompt included
    std::vector<int32_t> stop_ids;
    int32_t placeholder = -1;  // never drafted
};

class StepDrafter {
  public:
    static constexpr size_t kPiece = 64;  // tokens of a feed between which a step may come

    StepDrafter(size_t slots, std::chrono::nanoseconds patience) : slots_(slots), patience_(patience) {}

    // Gives a request the slot, and feeds its output to its trees, from the calling thread. Returns its generation,
    // which no other request of this drafter has. `before` gets the tree of the slot's last request, for the caller to
    // release where it may: releasing the last reference of a Python object needs the GIL.
    int64_t set(size_t slot, const SlotRequest& request, std::shared_ptr<GroupTree>& before);
    void clear(size_t slot, std::shared_ptr<GroupTree>& before);

    // Uses this tree of all groups from the next step on, after all outputs are fed to it; null: none. `tree` gets the
    // last one.
    void use_common(std::shared_ptr<GroupTree>& tree);

    // As tree.append, in pieces between which steps may come: those before one that is refused are appended.
    void feed(GroupTree& tree, int64_t request, int64_t previous, std::span<const int32_t> tokens);

    void step(const Step& step) noexcept;

    // For tests: from now on each step first sleeps at random, so long at most, and a third go without drafts.
    void stall(std::chrono::nanoseconds most) { stall_ = most.count(); }

    size_t slots() const { return slots_.size(); }
    int64_t refused() const { return refused_; }          // times a tree refused a row's or a new request's tokens
    int64_t missed() const { return missed_; }            // steps that went without drafts
    int64_t nanoseconds() const { return nanoseconds_; }  // of all steps
    int64_t waited() const { return waited_; }            // of these, for their turn

  private:
    struct Slot {
        int64_t generation = 0;  // 0: no request
        std::shared_ptr<GroupTree> tree;
        int64_t index = -1, common_name = -1;
        std::vector<int32_t> tokens;  // the prompt's last ones, as far as contexts reach, and the output
        size_t prompt = 0;            // of them
        int64_t end = 0;              // a draft ends before so many output tokens: the last one is sampled
        std::vector<int32_t> stop_ids;
        int32_t placeholder = -1;
        size_t told = 0;      // output tokens that both trees were given
        bool judged = false;  // whether it is known if the group's tree is full
        bool learns = false;  // it is not

        std::span<const int32_t> output() const { return std::span(tokens).subspan(prompt); }
    };

    // What a row drew in a step that went without drafts.
    struct Late {
        int32_t slot;
        int64_t generation;
        std::vector<int32_t> tokens;
    };

    template <class Action>
    auto between_steps(Action&& action);
    bool lock_in_time(std::unique_lock<std::timed_mutex>& lock) const;
    bool sleep_at_random();
    void learn_late();
    size_t teach(GroupTree* tree, int64_t request, std::span<const int32_t> output);
    Slot* slot_of(int32_t slot, int64_t generation);
    uint32_t draft(Slot& slot, std::span<const int32_t> sampled, const Step& step, const DraftView& out);

    std::vector<Slot> slots_;
    std::shared_ptr<GroupTree> common_;
    int64_t generations_ = 0;
    std::timed_mutex mutex_;
    std::atomic<int> steps_ = 0;  // that run, or wait to
    std::mutex one_step_;         // of the steps; guards what follows
    std::vector<Late> late_;      // a few steps' at most: nobody has the mutex for longer
    const std::chrono::nanoseconds patience_;
    std::atomic<int64_t> stall_ = 0;  // nanoseconds
    uint64_t dice_ = 1;               // of stalls; guarded by one_step_
    std::atomic<int64_t> refused_ = 0, missed_ = 0, nanoseconds_ = 0, waited_ = 0;
};

}  // namespace seer
