// Lists of the newest positions where a context occurred, in 4, 16 or 64 bytes each.
//
// Invariants:
// - a list holds the newest kMost positions added to it;
// - `overflowed` is true once more than kMost were added.
#pragma once

#include <cstdint>

#include "tree/chunked.hpp"
#include "tree/token_store.hpp"

namespace seer {

class Occurrences {
  public:
    static constexpr uint32_t kMost = 15;

    // Lists are named by 32-bit references: a lone position, or the index of a small or a large list.
    using Reference = uint32_t;
    static Reference lone(Position p) { return p; }

    // Adds a position; the reference may change. True if the list was full already.
    bool add(Reference& reference, Position p) {
        switch (reference >> kTagShift) {
            case kLone:
                reference = kSmallTag | take_small({2, {reference, p, kNone}});
                return false;
            case kSmall: {
                Small& few = small_[reference & kIndex];
                if (few.count < 3) {
                    few.positions[few.count++] = p;
                    return false;
                }
                Large many{4, {few.positions[0], few.positions[1], few.positions[2], p}};
                few.positions[0] = free_small_;
                free_small_ = reference & kIndex;
                reference = kLargeTag | large_.push(many);
                return false;
            }
            default: {
                Large& many = large_[reference & kIndex];
                many.positions[many.added++ % kMost] = p;
                return many.added > kMost;
            }
        }
    }

    void prefetch(Reference reference) const {
        const uint32_t tag = reference >> kTagShift, index = reference & kIndex;
        if (tag == kSmall) __builtin_prefetch(&small_[index], 1);
        if (tag == kLarge) __builtin_prefetch(&large_[index], 1);
    }

    bool overflowed(Reference reference) const {
        return reference >> kTagShift == kLarge && large_[reference & kIndex].added > kMost;
    }

    // The positions, newest first, into out[kMost]; returns how many.
    uint32_t read(Reference reference, Position* out) const {
        switch (reference >> kTagShift) {
            case kLone:
                out[0] = reference;
                return 1;
            case kSmall: {
                const Small& few = small_[reference & kIndex];
                for (uint32_t i = 0; i < few.count; ++i) out[i] = few.positions[few.count - 1 - i];
                return few.count;
            }
            default: {
                const Large& many = large_[reference & kIndex];
                const uint32_t count = many.added < kMost ? many.added : kMost;
                for (uint32_t i = 0, at = many.added % kMost; i < count; ++i) {
                    at = at == 0 ? kMost - 1 : at - 1;
                    out[i] = many.positions[at];
                }
                return count;
            }
        }
    }

    size_t bytes() const { return small_.bytes() + large_.bytes(); }

  private:
    static constexpr uint32_t kTagShift = 30, kIndex = (1u << kTagShift) - 1;
    static constexpr uint32_t kLone = 0, kSmall = 1, kLarge = 2;
    static constexpr uint32_t kSmallTag = kSmall << kTagShift, kLargeTag = kLarge << kTagShift;

    struct Small {
        uint32_t count;
        Position positions[3];
    };
    struct alignas(64) Large {
        uint32_t added;
        Position positions[kMost];
    };

    uint32_t take_small(const Small& value) {
        if (free_small_ == kNone) return small_.push(value);
        const uint32_t index = free_small_;
        free_small_ = small_[index].positions[0];
        small_[index] = value;
        return index;
    }

    Chunked<Small, 1024> small_;
    Chunked<Large, 256> large_;
    uint32_t free_small_ = kNone;  // free list of small lists that became large, linked by positions[0]
};

}  // namespace seer
