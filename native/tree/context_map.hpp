// A map from hashes of contexts to 32-bit values, by extendible hashing.
//
// Invariants:
// - an insertion moves at most one segment's entries (and now and then the directory of pointers):
//   there is no rehash of everything;
// - values are never removed.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

namespace seer {

class ContextMap {
  public:
    static constexpr uint32_t kEmpty = UINT32_MAX;  // not a value

    ContextMap();

    // The value of a hash, kEmpty if there is none. Contexts with equal hashes share a value.
    uint32_t find(uint32_t hash) const {
        const Table table = table_of(hash);
        for (uint32_t i = hash;; ++i) {
            const Slot& slot = table.slots[i & table.mask];
            if (slot.value == kEmpty || slot.hash == hash) return slot.value;
        }
    }

    // The place of a hash's value, valid until the next call; it holds kEmpty if the hash is new, and
    // must then be written.
    uint32_t& place(uint32_t hash);

    void prefetch(uint32_t hash) const {
        const Table table = table_of(hash);
        __builtin_prefetch(table.slots + (hash & table.mask));
    }
    size_t bytes() const;

  private:
    static constexpr uint32_t kSegment = 128;
    static constexpr uint32_t kFull = 104;  // entries of kSegment at most: with more, probes grow long

    struct Slot {
        uint32_t hash;
        uint32_t value;
    };
    struct Segment {
        uint32_t depth;  // how many leading bits its hashes share
        uint32_t count;
        std::array<Slot, kSegment> slots;
    };
    struct Table {
        Slot* slots;
        uint32_t mask;
    };

    Table table_of(uint32_t hash) const {
        if (directory_.empty()) return {small_.get(), small_size_ - 1};
        return {directory_[segment_of(hash)]->slots.data(), kSegment - 1};
    }
    size_t segment_of(uint32_t hash) const { return static_cast<size_t>(uint64_t{hash} << depth_ >> 32); }
    void grow_small();
    void split(uint32_t hash);
    Segment* add_segment(uint32_t depth);

    std::unique_ptr<Slot[]> small_;  // doubles until it would outgrow a segment
    uint32_t small_size_ = 4;
    uint32_t small_count_ = 0;
    uint32_t depth_ = 0;  // the directory has 2^depth_ entries
    std::vector<Segment*> directory_;
    std::vector<std::unique_ptr<Segment>> segments_;
};

}  // namespace seer
