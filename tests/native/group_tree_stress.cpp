// The group tree under sanitizers: `make sanitize` builds this twice and runs it.
//
// First one thread: streams are checked against copies of them, through branches, overlaps and refusals,
// at sizes where lists overflow, chunks fill and map segments split. Then threads that append, draft and
// read figures of the same trees, as engines' batch calls do.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tree/context_drafter.hpp"
#include "tree/group_tree.hpp"

namespace {

using seer::ContextDrafter;
using seer::GroupTree;
using Stream = std::vector<int32_t>;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "failed: %s\n", what);
    std::exit(1);
}

uint32_t below(std::mt19937& random, uint32_t limit) { return static_cast<uint32_t>(random()) % limit; }

struct Drafted {
    std::array<int32_t, ContextDrafter::kMaxTokens> token_ids, parents;
    std::array<float, ContextDrafter::kMaxTokens> scores;
    seer::DraftView view() { return {token_ids, parents, scores}; }
};

void check_draft(const Drafted& drafted, uint32_t count, const seer::DraftOptions& options) {
    require(count <= options.max_tokens, "no more tokens than asked for");
    for (uint32_t i = 0; i < count; ++i) {
        const int32_t parent = drafted.parents[i];
        require(parent >= -1 && parent < static_cast<int32_t>(i), "parents come first");
        const float before = parent < 0 ? 1.0f : drafted.scores[static_cast<size_t>(parent)];
        require(drafted.scores[i] >= 0.0f && drafted.scores[i] <= before, "scores fall along a path, to 0 if it is long");
    }
}

// Tokens that repeat themselves and each other, like a group's.
Stream some_tokens(std::mt19937& random, uint32_t most) {
    Stream tokens(below(random, most) + 1);
    const uint32_t values = below(random, 3) == 0 ? 2 : 5000;
    const uint32_t start = below(random, values), step = below(random, 2);
    for (size_t i = 0; i < tokens.size(); ++i)
        tokens[i] = static_cast<int32_t>(below(random, 50) == 0 ? below(random, values) : (start + step * static_cast<uint32_t>(i)) % values);
    return tokens;
}

void one_thread(uint32_t seed) {
    std::mt19937 random(seed);
    GroupTree tree(some_tokens(random, 40), size_t{1} << 30);
    std::map<int64_t, Stream> streams;
    for (int step = 0; step < 3000; ++step) {
        const int64_t request = below(random, 16);
        Stream& known = streams[request];
        const size_t at = below(random, 4) == 0 && !known.empty() ? below(random, static_cast<uint32_t>(known.size())) : known.size();
        const Stream tokens = some_tokens(random, 100);
        tree.append(request, static_cast<int64_t>(at), tokens);
        size_t same = 0;
        while (same < tokens.size() && at + same < known.size() && known[at + same] == tokens[same]) ++same;
        if (same < tokens.size()) {
            known.resize(at + same);
            known.insert(known.end(), tokens.begin() + static_cast<std::ptrdiff_t>(same), tokens.end());
        }
        require(tree.length(request) == static_cast<int64_t>(known.size()), "a stream is as long as it was told");
        Drafted by_request, by_context;
        const seer::DraftOptions options{below(random, ContextDrafter::kMaxTokens + 1), below(random, 40) + 1, below(random, 9), 0.0};
        const uint32_t count = tree.draft(request, options, by_request.view());
        check_draft(by_request, count, options);
        if (known.size() < seer::kMaxContext) continue;
        require(tree.draft(known, request, options, by_context.view()) == count, "a request is its context");
        require(std::equal(by_request.token_ids.begin(), by_request.token_ids.begin() + count,
                           by_context.token_ids.begin()), "a request's draft is its context's");
    }
    bool refused = false;
    try {
        tree.append(0, static_cast<int64_t>(streams[0].size()) + 1, Stream{1});
    } catch (const std::invalid_argument&) {
        refused = true;
    }
    require(refused, "a gap is refused");
}

void many_threads() {
    constexpr int kWriters = 4, kAppends = 400;
    std::array<GroupTree, 2> trees{GroupTree(Stream{1, 2, 3}, size_t{1} << 30), GroupTree({}, size_t{1} << 30)};
    std::vector<std::thread> threads;
    for (int writer = 0; writer < kWriters; ++writer)
        threads.emplace_back([&trees, writer] {  // an engine: appends to each tree, then drafts from it
            std::mt19937 random(static_cast<uint32_t>(writer));
            std::array<Stream, 2> streams;
            Drafted drafted;
            for (int i = 0; i < kAppends; ++i)
                for (size_t t = 0; t < trees.size(); ++t) {
                    const Stream tokens = some_tokens(random, 64);
                    const auto previous = static_cast<int64_t>(streams[t].size());
                    streams[t].insert(streams[t].end(), tokens.begin(), tokens.end());
                    trees[t].append(writer, previous, tokens);
                    const seer::DraftOptions options{32, 4, 8, 0.01};
                    check_draft(drafted, trees[t].draft(streams[t], writer, options, drafted.view()), options);
                }
        });
    for (int reader = 0; reader < 2; ++reader)
        threads.emplace_back([&trees, reader] {
            std::mt19937 random(static_cast<uint32_t>(100 + reader));
            Drafted drafted;
            for (int i = 0; i < 2 * kAppends; ++i)
                for (GroupTree& tree : trees) {
                    const seer::DraftOptions options{below(random, 64), 8, 0, 0.0};
                    check_draft(drafted, tree.draft(some_tokens(random, 20), -1, options, drafted.view()), options);
                    require(tree.bytes() > 0 && tree.length(99) == -1, "figures can be read meanwhile");
                }
        });
    for (std::thread& thread : threads) thread.join();
    require(trees[0].tokens() > 3, "the writers wrote");
}

}  // namespace

int main() {
    for (uint32_t seed = 0; seed < 4; ++seed) one_thread(seed);
    many_threads();
    std::puts("group tree: ok");
    return 0;
}
