// One row's part of a step, as draft_batch and StepDrafter take it: what its request said goes into the trees, and
// the better tree drafts.
#pragma once

#include <cstdint>
#include <span>

#include "tree/group_tree.hpp"

namespace seer {

// A request in a tree (null: none): `fresh` follows its first `previous` tokens. Request -1 appends nothing.
struct Said {
    GroupTree* tree;
    int64_t request, previous;
    std::span<const int32_t> fresh;
};

// Appends to both trees, and writes a draft of what follows `context`: that of the group's tree, or the common
// tree's if more of it is expected to be accepted, by the sum of scores, which `out` must have room for then. The
// common tree is left alone if its request is -1. Returns how many tokens; throws as GroupTree::append.
uint32_t append_and_draft(const Said& group, const Said& common, std::span<const int32_t> context,
                          const DraftOptions& options, const DraftView& out);

}  // namespace seer
