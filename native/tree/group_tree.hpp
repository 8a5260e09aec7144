// The suffix tree of one group's responses, and drafts from it: see docs/drafts.md.
//
// Invariants:
// - a level is a context length; an occurrence is added at level l + 1 only if the list of level l was full, so
//   an append changes at most kLevels lists, also in repetitive text;
// - a draft depends only on the tokens appended and their order;
// - any number of drafts run at once; an append runs alone.
#pragma once

#include <array>
#include <cstdint>
#include <shared_mutex>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "tree/context_map.hpp"
#include "tree/occurrences.hpp"
#include "tree/token_store.hpp"

namespace seer {

inline constexpr std::array<uint32_t, 6> kLevels{1, 2, 4, 8, 16, 32};
inline constexpr uint32_t kMaxContext = kLevels.back();

// A place where the context occurred before: the token that followed, and how much of the context matched.
struct Match {
    Position next;
    uint32_t length;
};

struct DraftOptions {
    uint32_t max_tokens;
    uint32_t top_k = 1;      // paths (leaves) at most
    uint32_t max_depth = 0;  // tokens of one path at most; 0: max_tokens
    double min_score = 0.0;  // of a token: the product of its path's probabilities
};

// Draft tokens, parents before children; a parent of -1 is the context's end.
struct DraftView {
    std::span<int32_t> token_ids, parents;  // parents may be empty: not wanted
    std::span<float> scores;                // likewise
};

class GroupTree {
  public:
    // The prompt comes before every request's first token.
    explicit GroupTree(std::span<const int32_t> prompt, size_t max_bytes);

    // Adds the tokens that follow a request's first `previous` ones; known ones are skipped. From the first that
    // differs, the request continues with the new ones; the old ones stay as another branch.
    // Throws std::invalid_argument on a gap or a negative token, std::length_error beyond max_bytes; nothing is
    // appended then.
    void append(int64_t request, int64_t previous, std::span<const int32_t> tokens);

    // Writes a draft of what follows the request's tokens, or the context, in which the tokens of request
    // `own` weigh more (-1: no request); returns how many tokens. The view must have room for max_tokens.
    uint32_t draft(int64_t request, const DraftOptions& options, const DraftView& out) const;
    uint32_t draft(std::span<const int32_t> context, int64_t own, const DraftOptions& options,
                   const DraftView& out) const;

    // (matched length, next token) of every occurrence that a draft would start from, longest level first.
    std::vector<std::pair<uint32_t, int32_t>> matches(std::span<const int32_t> context) const;

    // Tokens of a request's current branch; -1 if it is unknown.
    int64_t length(int64_t request) const;
    // How many of the tokens that `append` would take are known already, from the first on; 0 where it would throw.
    size_t known(int64_t request, int64_t previous, std::span<const int32_t> tokens) const;
    size_t bytes() const;
    bool full() const { return bytes() >= max_bytes_; }  // takes no more tokens
    uint64_t tokens() const;  // held, all branches and the prompt

  private:
    struct Request {
        Position tail;  // the prompt's while length is 0
        uint32_t owner;
        int64_t length = 0;
    };

    // A new token on its way down the levels; `context` is how many tokens before it are hashed.
    struct Arrival {
        Position position;
        uint32_t context, hash;
    };

    void extend(Request& request, std::span<const int32_t> tokens);
    void extend_slice(Request& request, std::span<const int32_t> tokens);
    std::span<const int32_t> forget_known(Request& request, int64_t previous, std::span<const int32_t> tokens) const;
    std::span<Arrival> learn(uint32_t level, std::span<Arrival> arrivals, const uint64_t* prefixes);
    size_t bytes_unlocked() const;

    mutable std::shared_mutex mutex_;
    TokenStore store_;
    ContextMap contexts_;
    Occurrences occurrences_;
    std::unordered_map<int64_t, Request> requests_;
    Position prompt_tail_ = kNone;
    uint64_t tokens_ = 0;
    size_t max_bytes_;
};

}  // namespace seer
