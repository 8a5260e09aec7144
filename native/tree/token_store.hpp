// The tokens of a group: streams that share prefixes.
//
// Invariants:
// - a position always names the same token; tokens are never moved, changed or removed;
// - going back from a position yields its stream up to the prompt's first token;
// - a stream that diverges from another starts a block of its own; the other one stays as it is.
#pragma once

#include <cstdint>
#include <span>

#include "tree/chunked.hpp"

namespace seer {

using Position = uint32_t;  // block * 16 + offset
inline constexpr uint32_t kNone = UINT32_MAX;

class TokenStore {
  public:
    static constexpr uint32_t kMaxBlocks = 1u << 26;  // a position takes 30 bits, see Occurrences

    int32_t token(Position p) const { return block(p).tokens[p % 16]; }

    // The token before p in its stream; kNone at the beginning.
    Position before(Position p) const { return p % 16 > 0 ? p - 1 : block(p).previous; }

    // The first token that was appended after p, kNone if there is none (diverging streams are found by context).
    Position after(Position p) const {
        const Block& b = block(p);
        const uint32_t offset = p % 16 + 1;
        if (offset < b.fill) return p + 1;
        return offset < kTokens || b.next == kNone ? kNone : b.next * 16;
    }

    // Which request a token was appended for.
    uint32_t owner(Position p) const { return block(p).owner; }

    // Adds a token after `tail`. A stream grows only in blocks of its own request.
    Position append(Position tail, int32_t token, uint32_t owner) {
        const bool own = tail != kNone && block(tail).owner == owner;
        if (own && tail % 16 + 1 == block(tail).fill && block(tail).fill < kTokens) {
            Block& b = blocks_[tail / 16];
            b.tokens[b.fill++] = token;
            return tail + 1;
        }
        const uint32_t fresh = blocks_.push(Block{{token}, tail, kNone, 1, owner});
        if (own && tail % 16 + 1 == kTokens && block(tail).next == kNone)
            blocks_[tail / 16].next = fresh;
        return fresh * 16;
    }

    // The last tokens up to `tail`, newest first, as many as `out` has room for or there are; returns how many.
    uint32_t last(Position tail, std::span<int32_t> out) const {
        uint32_t count = 0;
        for (Position p = tail; p != kNone && count < out.size();) {
            const Block& b = block(p);
            for (uint32_t i = p % 16 + 1; i > 0 && count < out.size(); --i) out[count++] = b.tokens[i - 1];
            p = b.previous;
        }
        return count;
    }

    // How many of these tokens are also those that end at `tail`.
    uint32_t match(Position tail, std::span<const int32_t> newest_first) const {
        uint32_t length = 0;
        for (Position p = tail; p != kNone;) {
            const Block& b = block(p);
            for (uint32_t i = p % 16 + 1; i > 0; --i, ++length)
                if (length == newest_first.size() || b.tokens[i - 1] != newest_first[length]) return length;
            p = b.previous;
        }
        return length;
    }

    void prefetch(Position p) const { __builtin_prefetch(&block(p)); }
    uint32_t room() const { return kMaxBlocks - blocks_.size(); }  // tokens that surely fit: each may start a block
    size_t bytes() const { return blocks_.bytes(); }

  private:
    static constexpr uint32_t kTokens = 13;  // as many as fit a cache line with the links

    struct alignas(64) Block {
        int32_t tokens[kTokens];
        Position previous;  // the token before the first one
        uint32_t next;      // the block that goes on after the last token
        uint32_t fill : 4;
        uint32_t owner : 28;
    };
    static_assert(sizeof(Block) == 64);

    const Block& block(Position p) const { return blocks_[p / 16]; }

    Chunked<Block, 256> blocks_;
};

}  // namespace seer
