// An array that grows chunk by chunk.
//
// Invariants:
// - growing moves at most one chunk's bytes: appending to a large array never stalls on a copy of it;
// - the first chunk starts at one element and doubles, so a small array takes little memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace seer {

// kChunk, a power of two: elements of a full chunk.
template <class T, uint32_t kChunk>
class Chunked {
  public:
    T& operator[](uint32_t i) { return chunks_[i / kChunk][i % kChunk]; }
    const T& operator[](uint32_t i) const { return chunks_[i / kChunk][i % kChunk]; }
    uint32_t size() const { return size_; }

    uint32_t push(const T& value) {
        if (size_ == capacity_) grow();
        (*this)[size_] = value;
        return size_++;
    }

    size_t bytes() const { return capacity_ * sizeof(T) + chunks_.capacity() * sizeof(chunks_[0]); }

  private:
    void grow() {
        if (capacity_ == 0 || capacity_ >= kChunk) {
            const uint32_t more = capacity_ == 0 ? 1 : kChunk;
            chunks_.push_back(std::make_unique_for_overwrite<T[]>(more));
            capacity_ += more;
            return;
        }
        auto larger = std::make_unique_for_overwrite<T[]>(size_t{capacity_} * 2);
        std::copy_n(chunks_[0].get(), size_, larger.get());
        chunks_[0] = std::move(larger);
        capacity_ *= 2;
    }

    std::vector<std::unique_ptr<T[]>> chunks_;
    uint32_t size_ = 0;
    uint32_t capacity_ = 0;
};

}  // namespace seer
