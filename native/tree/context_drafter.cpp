#include "tree/context_drafter.hpp"

#include <algorithm>

#include "tree/context_hash.hpp"

namespace seer {
namespace {

// Chosen by acceptance at equal drafted tokens (docs/drafts.md). Longer matches weigh more.
constexpr uint32_t kEscape = 2;
constexpr uint32_t kOwn = 2;  // a request repeats itself more than it repeats others

uint32_t weight(uint32_t length) {
    return length * length * length;
}

}  // namespace

std::span<const Match> ContextDrafter::find(std::span<const int32_t> newest_first) {
    std::array<uint32_t, kLevels.size()> hashes;
    size_t reach = 0;
    uint64_t hash = 0, power = 1;
    for (uint32_t i = 0; reach < kLevels.size() && i < newest_first.size(); ++i) {
        hash += (static_cast<uint32_t>(newest_first[i]) + uint64_t{1}) * power;
        power *= kBase;
        if (i + 1 != kLevels[reach]) continue;
        hashes[reach] = context_hash(0, hash, 0, i + 1);
        contexts_.prefetch(hashes[reach++]);  // all levels' misses at once
    }
    std::array<Occurrences::Reference, kLevels.size()> lists;
    size_t levels = 0;
    while (levels < reach && (lists[levels] = contexts_.find(hashes[levels])) != ContextMap::kEmpty)
        if (!occurrences_.overflowed(lists[levels++])) break;
    uint32_t count = 0;
    std::array<Position, Occurrences::kMost> newest;
    std::array<Position, kMaxMatches> known;
    known.fill(kNone);
    while (levels > 0 && count < kMaxMatches) {
        const uint32_t size = occurrences_.read(lists[--levels], newest.data());
        for (uint32_t i = 0; i < size; ++i) store_.prefetch(newest[i]);
        for (uint32_t i = 0; i < size && count < kMaxMatches; ++i) {
            const Position p = newest[i];
            uint32_t repeated = 0;  // no early exit, no other length: compilers compare all at once
            for (const Position each : known) repeated |= each == p;
            if (repeated != 0) continue;
            const uint32_t length = store_.match(store_.before(p), newest_first);
            if (length == 0) continue;  // the hashes collided
            known[count] = p;
            found_[count++] = {p, length};
        }
    }
    return {found_.data(), count};
}

void ContextDrafter::look_up_path(uint32_t node) {
    std::array<int32_t, kMaxContext> newest_first;
    uint32_t count = 0;
    for (uint32_t n = node; n > 0 && count < kMaxContext; n = nodes_[n].parent) newest_first[count++] = nodes_[n].token;
    const size_t older = std::min<size_t>(kMaxContext - count, context_.size());
    std::copy_n(context_.begin(), older, newest_first.begin() + count);
    for (const Match& match : find({newest_first.data(), count + older}))
        add_place(match.next, weight(match.length) * (store_.owner(match.next) == owner_ ? kOwn : 1));
}

// Finds the places of a node: the parent's places that agree with the node's token, or else places of the node's path.
void ContextDrafter::follow(uint32_t index) {
    Node& node = nodes_[index];
    node.first_place = place_count_;
    const Node& parent = nodes_[node.parent];
    for (uint32_t i = 0; index > 0 && i < parent.places; ++i) {
        const Place& place = places_[parent.first_place + i];
        if (place.token != node.token) continue;
        const Position next = store_.after(place.next);
        if (next != kNone) add_place(next, place.weight);  // a stream has one owner: its weight stays
    }
    if (place_count_ == node.first_place) look_up_path(index);
    node.places = place_count_ - node.first_place;
}

void ContextDrafter::propose(uint32_t index, const DraftOptions& options) {
    follow(index);
    const Node& node = nodes_[index];
    std::array<int32_t, kMaxMatches> tokens;
    std::array<uint32_t, kMaxMatches> weights;
    uint32_t count = 0;
    uint64_t total = kEscape;
    for (const Place& place : std::span(places_).subspan(node.first_place, node.places)) {
        total += place.weight;
        uint32_t i = 0;
        while (i < count && tokens[i] != place.token) ++i;
        if (i == count) {
            tokens[count] = place.token;
            weights[count++] = 0;
        }
        weights[i] += place.weight;
    }
    for (uint32_t fork = 0; fork < std::min({options.top_k, kMaxForks, count}); ++fork) {
        const auto best = static_cast<size_t>(std::max_element(weights.begin(), weights.begin() + count) - weights.begin());
        const double score = node.score * (static_cast<double>(weights[best]) / static_cast<double>(total));
        if (weights[best] == 0 || score < options.min_score) return;
        proposals_[proposal_count_++] = {score, proposed_++, index, tokens[best]};
        std::push_heap(proposals_.begin(), proposals_.begin() + proposal_count_);
        weights[best] = 0;
    }
}

uint32_t ContextDrafter::draft(std::span<const int32_t> newest_first, uint32_t owner, const DraftOptions& options, const DraftView& out) {
    context_ = newest_first;
    owner_ = owner;
    nodes_[0] = {0, 0, 0, 0, 0, 0, 1.0};
    node_count_ = 1;
    uint32_t leaves = 0;
    const uint32_t max_depth = options.max_depth > 0 ? options.max_depth : options.max_tokens;
    if (options.max_tokens > 0) propose(0, options);
    while (proposal_count_ > 0 && node_count_ <= options.max_tokens) {
        std::pop_heap(proposals_.begin(), proposals_.begin() + proposal_count_);
        const Proposal proposal = proposals_[--proposal_count_];
        const bool forks = proposal.parent == 0 || nodes_[proposal.parent].children > 0;
        if (forks && leaves == options.top_k) continue;
        leaves += forks;
        Node& parent = nodes_[proposal.parent];
        ++parent.children;
        const uint32_t index = node_count_++;
        nodes_[index] = {proposal.token, proposal.parent, parent.depth + 1, 0, 0, 0, proposal.score};
        out.token_ids[index - 1] = proposal.token;
        if (!out.parents.empty()) out.parents[index - 1] = static_cast<int32_t>(proposal.parent) - 1;
        if (!out.scores.empty()) out.scores[index - 1] = static_cast<float>(proposal.score);
        if (nodes_[index].depth < max_depth && node_count_ <= options.max_tokens) propose(index, options);
    }
    return node_count_ - 1;
}

}  // namespace seer
