// Drafts what follows a context, from the places in the group's responses where it occurred.
//
// A place weighs more the longer its match; a token's probability is the weight of the places that
// continue with it, over the weight of all places plus that of a token never seen (kEscape). Weights are
// integers, so the order of summing does not matter. A request's own places weigh more than those of the
// group's other responses. The most probable token is drafted, and the places that agree with it are followed;
// where none is left, the drafted tokens are looked up as context. A place keeps its weight along a path: that
// it agrees with tokens drafted from it is no evidence.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "tree/group_tree.hpp"

namespace seer {

class ContextDrafter {
  public:
    static constexpr uint32_t kMaxTokens = 128;  // of a draft
    static constexpr uint32_t kMaxMatches = 16;  // places used; 32 take a third longer, for 0.2 % more acceptance
    static constexpr uint32_t kMaxForks = 4;     // alternatives after one token

    ContextDrafter(const TokenStore& store, const ContextMap& contexts, const Occurrences& occurrences)
        : store_(store), contexts_(contexts), occurrences_(occurrences) {}

    // Places where the context occurred, longest level first, newest first within a level; valid until the next call.
    std::span<const Match> find(std::span<const int32_t> newest_first);

    // `owner`: the request whose own places weigh more, kNone for none.
    uint32_t draft(std::span<const int32_t> newest_first, uint32_t owner, const DraftOptions& options, const DraftView& out);

  private:
    // A drafted token; node 0 is the context's end, node i + 1 the draft's token i.
    struct Node {
        int32_t token;
        uint32_t parent, depth, children;
        uint32_t first_place, places;
        double score;
    };
    // Where a path goes on: what follows there, and how much that counts.
    struct Place {
        Position next;
        int32_t token;
        uint32_t weight;
    };
    struct Proposal {
        double score;
        uint32_t order, parent;
        int32_t token;
        bool operator<(const Proposal& other) const {  // for a heap with the best on top, the oldest of equals
            return score != other.score ? score < other.score : order > other.order;
        }
    };

    void propose(uint32_t node, const DraftOptions& options);
    void follow(uint32_t node);
    void look_up_path(uint32_t node);
    void add_place(Position next, uint32_t weight) { places_[place_count_++] = {next, store_.token(next), weight}; }

    const TokenStore& store_;
    const ContextMap& contexts_;
    const Occurrences& occurrences_;
    std::span<const int32_t> context_;
    uint32_t owner_ = kNone;
    uint32_t node_count_ = 0, place_count_ = 0, proposal_count_ = 0, proposed_ = 0;
    std::array<Match, kMaxMatches> found_;
    std::array<Node, kMaxTokens + 1> nodes_;
    std::array<Proposal, kMaxTokens * kMaxForks + kMaxForks> proposals_;
    std::array<Place, (kMaxTokens + 1) * kMaxMatches> places_;
};

}  // namespace seer
