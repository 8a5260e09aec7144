#include "drafts/row_draft.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "tree/drafter.hpp"

namespace seer {
namespace {

float expected(std::span<const float> scores) { return std::accumulate(scores.begin(), scores.end(), 0.0F); }

}  // namespace

uint32_t append_and_draft(const Said& group, const Said& common, std::span<const int32_t> context,
                          const DraftOptions& options, const DraftView& out) {
    uint32_t count = 0;
    if (group.tree != nullptr) {
        if (group.request >= 0) group.tree->append(group.request, group.previous, group.fresh);
        count = group.tree->draft(context, group.request, options, out);
    }
    if (common.tree == nullptr || common.request < 0) return count;
    common.tree->append(common.request, common.previous, common.fresh);
    if (options.max_tokens == 0) return count;
    std::array<int32_t, Drafter::kMaxTokens> token_ids, parents;
    std::array<float, Drafter::kMaxTokens> scores;
    const uint32_t others = common.tree->draft(context, common.request, options, {token_ids, parents, scores});
    if (expected({scores.data(), others}) <= expected(out.scores.first(count))) return count;
    std::copy_n(token_ids.begin(), others, out.token_ids.begin());
    std::copy_n(scores.begin(), others, out.scores.begin());
    if (!out.parents.empty()) std::copy_n(parents.begin(), others, out.parents.begin());
    return others;
}

}  // namespace seer
