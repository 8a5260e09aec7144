#include "tree/context_map.hpp"

#include <algorithm>

namespace seer {
namespace {

template <class Slot>
void insert_new(Slot* slots, uint32_t mask, const Slot& slot) {
    uint32_t i = slot.hash;
    while (slots[i & mask].value != ContextMap::kEmpty) ++i;
    slots[i & mask] = slot;
}

}  // namespace

ContextMap::ContextMap() {
    small_ = std::make_unique_for_overwrite<Slot[]>(small_size_);
    std::fill_n(small_.get(), small_size_, Slot{0, kEmpty});
}

uint32_t& ContextMap::place(uint32_t hash) {
    for (;;) {
        const Table table = table_of(hash);
        uint32_t i = hash;
        while (table.slots[i & table.mask].value != kEmpty && table.slots[i & table.mask].hash != hash) ++i;
        Slot& slot = table.slots[i & table.mask];
        if (slot.value != kEmpty) return slot.value;
        if (directory_.empty() ? (small_count_ + 1) * 8 <= small_size_ * 7 : directory_[segment_of(hash)]->count < kFull) {
            ++(directory_.empty() ? small_count_ : directory_[segment_of(hash)]->count);
            slot.hash = hash;
            return slot.value;
        }
        directory_.empty() ? grow_small() : split(hash);
    }
}

size_t ContextMap::bytes() const {
    return (small_ ? small_size_ * sizeof(Slot) : 0) + segments_.size() * sizeof(Segment) +
           (directory_.capacity() + segments_.capacity()) * sizeof(Segment*);
}

ContextMap::Segment* ContextMap::add_segment(uint32_t depth) {
    segments_.push_back(std::make_unique_for_overwrite<Segment>());
    Segment* segment = segments_.back().get();
    segment->depth = depth;
    segment->count = 0;
    segment->slots.fill({0, kEmpty});
    return segment;
}

void ContextMap::grow_small() {
    const auto old = std::move(small_);
    const uint32_t size = small_size_;
    Slot* slots;
    if (size == kSegment) {
        Segment* only = add_segment(0);
        only->count = small_count_;
        directory_.assign(1, only);
        slots = only->slots.data();
    } else {
        small_size_ = size * 2;
        small_ = std::make_unique_for_overwrite<Slot[]>(small_size_);
        slots = small_.get();
        std::fill_n(slots, small_size_, Slot{0, kEmpty});
    }
    const uint32_t mask = directory_.empty() ? small_size_ - 1 : kSegment - 1;
    std::for_each_n(old.get(), size, [=](const Slot& slot) {
        if (slot.value != kEmpty) insert_new(slots, mask, slot);
    });
}

void ContextMap::split(uint32_t hash) {
    Segment* low = directory_[segment_of(hash)];
    if (low->depth == depth_) {
        std::vector<Segment*> doubled;
        doubled.reserve(directory_.size() * 2);
        for (Segment* segment : directory_) doubled.insert(doubled.end(), 2, segment);
        directory_ = std::move(doubled);
        ++depth_;
    }
    const auto slots = low->slots;
    const uint32_t bit = 31 - low->depth++;
    Segment* high = add_segment(low->depth);
    low->slots.fill({0, kEmpty});
    low->count = 0;
    for (const Slot& slot : slots) {
        if (slot.value == kEmpty) continue;
        Segment* half = (slot.hash >> bit & 1) != 0 ? high : low;
        insert_new(half->slots.data(), kSegment - 1, slot);
        ++half->count;
    }
    const size_t width = directory_.size() >> low->depth;
    const size_t first = segment_of(hash) / (2 * width) * (2 * width);
    std::fill_n(directory_.begin() + static_cast<std::ptrdiff_t>(first + width), width, high);
}

}  // namespace seer
