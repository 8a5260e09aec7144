#include "tree/group_tree.hpp"

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "tree/context_hash.hpp"
#include "tree/context_drafter.hpp"

namespace seer {
namespace {

constexpr size_t kSlice = 64;  // tokens learnt level by level, so that cache misses overlap
constexpr auto kPowers = powers_of_base(kLevels);
constexpr uint32_t kPromptOwner = 0;

void check_tokens(std::span<const int32_t> tokens, const char* what) {
    const auto bad = std::ranges::find_if(tokens, [](int32_t token) { return token < 0; });
    if (bad != tokens.end())
        throw std::invalid_argument(std::string(what) + "[" + std::to_string(bad - tokens.begin()) + "] is " +
                                    std::to_string(*bad) + "; token ids are not negative");
}

// The end of a context, newest token first.
struct Context {
    Context() = default;
    explicit Context(std::span<const int32_t> tokens) : size(std::min<size_t>(tokens.size(), kMaxContext)) {
        std::reverse_copy(tokens.end() - static_cast<std::ptrdiff_t>(size), tokens.end(), newest_first.begin());
    }
    std::span<const int32_t> view() const { return {newest_first.data(), size}; }

    std::array<int32_t, kMaxContext> newest_first;
    size_t size = 0;
};

}  // namespace

GroupTree::GroupTree(std::span<const int32_t> prompt, size_t max_bytes) : max_bytes_(max_bytes) {
    check_tokens(prompt, "prompt");
    if (prompt.size() > store_.room()) throw std::length_error("the prompt has more tokens than a tree can hold");
    Request request{kNone, kPromptOwner};
    extend(request, prompt);
    prompt_tail_ = request.tail;
}

void GroupTree::append(int64_t id, int64_t previous, std::span<const int32_t> tokens) {
    check_tokens(tokens, "tokens");
    const std::unique_lock lock(mutex_);
    const auto known = requests_.find(id);
    Request request = known != requests_.end() ? known->second : Request{prompt_tail_, static_cast<uint32_t>(requests_.size()) + 1};
    if (id < 0) throw std::invalid_argument("request_id is " + std::to_string(id) + "; ids are not negative");
    if (previous < 0 || previous > request.length)
        throw std::invalid_argument("prev_token_count is " + std::to_string(previous) + ", but request " +
                                    std::to_string(id) + " has " + std::to_string(request.length) +
                                    " tokens: append from there");
    const auto fresh = forget_known(request, previous, tokens);
    if (!fresh.empty() && (bytes_unlocked() >= max_bytes_ || fresh.size() > store_.room()))
        throw std::length_error("the tree holds " + std::to_string(bytes_unlocked()) + " bytes of at most " +
                                std::to_string(max_bytes_) + ": drop it, or raise max_bytes");
    extend(request, fresh);
    requests_.insert_or_assign(id, request);
}

std::span<const int32_t> GroupTree::forget_known(Request& request, int64_t previous,
                                                 std::span<const int32_t> tokens) const {
    Request differs = request;
    bool conflict = false;
    Position p = request.tail;
    for (int64_t i = request.length; i-- > previous; p = store_.before(p)) {
        const auto offset = static_cast<size_t>(i - previous);
        if (offset >= tokens.size() || store_.token(p) == tokens[offset]) continue;
        differs = {store_.before(p), request.owner, i};
        conflict = true;
    }
    if (conflict) request = differs;
    return tokens.subspan(std::min(tokens.size(), static_cast<size_t>(request.length - previous)));
}

void GroupTree::extend(Request& request, std::span<const int32_t> tokens) {
    for (size_t i = 0; i < tokens.size(); i += kSlice)
        extend_slice(request, tokens.subspan(i, std::min(kSlice, tokens.size() - i)));
}

void GroupTree::extend_slice(Request& request, std::span<const int32_t> tokens) {
    std::array<int32_t, kMaxContext> newest_first;
    const uint32_t context = store_.last(request.tail, newest_first);
    std::array<uint64_t, kMaxContext + kSlice> prefixes;
    std::array<Arrival, kSlice> arrivals;
    prefixes[0] = 0;
    for (uint32_t i = 0; i < context; ++i)
        prefixes[i + 1] = prefix_hash(prefixes[i], newest_first[context - 1 - i]);
    for (uint32_t i = 0; i < tokens.size(); ++i) {
        if (i > 0) prefixes[context + i] = prefix_hash(prefixes[context + i - 1], tokens[i - 1]);
        request.tail = store_.append(request.tail, tokens[i], request.owner);
        arrivals[i] = {request.tail, context + i, 0};
    }
    request.length += static_cast<int64_t>(tokens.size());
    tokens_ += tokens.size();
    auto going_on = std::span(arrivals).first(tokens.size());
    for (uint32_t level = 0; level < kLevels.size() && !going_on.empty(); ++level)
        going_on = learn(level, going_on, prefixes.data());
}

std::span<GroupTree::Arrival> GroupTree::learn(uint32_t level, std::span<Arrival> arrivals, const uint64_t* prefixes) {
    const uint32_t length = kLevels[level];
    size_t count = 0;
    for (const Arrival& arrival : arrivals) {
        if (arrival.context < length) continue;
        const uint64_t* end = prefixes + arrival.context;
        arrivals[count] = arrival;
        arrivals[count].hash = context_hash(*(end - length), *end, kPowers[level], length);
        contexts_.prefetch(arrivals[count++].hash);
    }
    arrivals = arrivals.first(count);
    for (const Arrival& arrival : arrivals) occurrences_.prefetch(contexts_.find(arrival.hash));
    count = 0;
    for (const Arrival& arrival : arrivals) {
        uint32_t& list = contexts_.place(arrival.hash);
        if (list == ContextMap::kEmpty)
            list = Occurrences::lone(arrival.position);
        else if (occurrences_.add(list, arrival.position))
            arrivals[count++] = arrival;
    }
    return arrivals.first(count);
}

uint32_t GroupTree::draft(int64_t id, const DraftOptions& options, const DraftView& out) const {
    const std::shared_lock lock(mutex_);
    const auto request = requests_.find(id);
    if (request == requests_.end())
        throw std::invalid_argument("request " + std::to_string(id) + " is unknown: append to it, or pass a context");
    Context context;
    context.size = store_.last(request->second.tail, context.newest_first);
    return ContextDrafter(store_, contexts_, occurrences_).draft(context.view(), request->second.owner, options, out);
}

uint32_t GroupTree::draft(std::span<const int32_t> tokens, int64_t own, const DraftOptions& options,
                          const DraftView& out) const {
    const Context context(tokens);
    const std::shared_lock lock(mutex_);
    const auto request = requests_.find(own);
    const uint32_t owner = request != requests_.end() ? request->second.owner : kNone;
    return ContextDrafter(store_, contexts_, occurrences_).draft(context.view(), owner, options, out);
}

std::vector<std::pair<uint32_t, int32_t>> GroupTree::matches(std::span<const int32_t> tokens) const {
    const Context context(tokens);
    const std::shared_lock lock(mutex_);
    ContextDrafter drafter(store_, contexts_, occurrences_);
    std::vector<std::pair<uint32_t, int32_t>> found;
    for (const Match& match : drafter.find(context.view())) found.emplace_back(match.length, store_.token(match.next));
    return found;
}

int64_t GroupTree::length(int64_t id) const {
    const std::shared_lock lock(mutex_);
    const auto request = requests_.find(id);
    return request == requests_.end() ? -1 : request->second.length;
}

size_t GroupTree::known(int64_t id, int64_t previous, std::span<const int32_t> tokens) const {
    const std::shared_lock lock(mutex_);
    const auto found = requests_.find(id);
    if (found == requests_.end() || previous < 0 || previous > found->second.length) return 0;
    Request request = found->second;
    return tokens.size() - forget_known(request, previous, tokens).size();
}

size_t GroupTree::bytes_unlocked() const {
    constexpr size_t kPerRequest = sizeof(int64_t) + sizeof(Request) + 4 * sizeof(void*);  // a node and its bucket
    return sizeof *this + store_.bytes() + contexts_.bytes() + occurrences_.bytes() + requests_.size() * kPerRequest;
}

size_t GroupTree::bytes() const {
    const std::shared_lock lock(mutex_);
    return bytes_unlocked();
}

uint64_t GroupTree::tokens() const {
    const std::shared_lock lock(mutex_);
    return tokens_;
}

}  // namespace seer
