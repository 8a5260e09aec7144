// Python's view of the group tree; described in seer/_native.pyi.
#include "bindings/modules.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>

#include "tree/context_drafter.hpp"
#include "tree/group_tree.hpp"

namespace nb = nanobind;

namespace {

using seer::DraftOptions;
using seer::GroupTree;

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Draft {
    std::vector<int32_t> token_ids, parents;
    std::vector<float> scores;
};

std::span<const int32_t> span_of(const Tokens& tokens) { return {tokens.data(), tokens.shape(0)}; }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

DraftOptions options_of(int64_t max_tokens, int64_t top_k, double min_score, std::optional<int64_t> max_depth) {
    const int64_t depth = max_depth.value_or(seer::ContextDrafter::kMaxTokens);
    if (max_tokens < 0 || max_tokens > seer::ContextDrafter::kMaxTokens)
        refuse("max_tokens is " + std::to_string(max_tokens) + "; must be 0 to " +
               std::to_string(seer::ContextDrafter::kMaxTokens));
    if (top_k < 1 || top_k > UINT32_MAX) refuse("top_k is " + std::to_string(top_k) + "; must be at least 1");
    if (depth < 1 || depth > UINT32_MAX) refuse("max_depth is " + std::to_string(depth) + "; must be at least 1");
    if (!(min_score >= 0.0 && min_score <= 1.0))
        refuse("min_score is " + std::to_string(min_score) + "; must be 0 to 1");
    return {static_cast<uint32_t>(max_tokens), static_cast<uint32_t>(top_k), static_cast<uint32_t>(depth), min_score};
}

// `source`: what GroupTree::draft takes before its options.
template <class... Source>
Draft draft(const GroupTree& tree, const DraftOptions& options, Source... source) {
    Draft made{std::vector<int32_t>(options.max_tokens), std::vector<int32_t>(options.max_tokens),
               std::vector<float>(options.max_tokens)};
    const uint32_t count = tree.draft(source..., options, {made.token_ids, made.parents, made.scores});
    made.token_ids.resize(count);
    made.parents.resize(count);
    made.scores.resize(count);
    return made;
}

void append(GroupTree& tree, int64_t request, int64_t previous, std::span<const int32_t> tokens) {
    const nb::gil_scoped_release release;  // an append may wait for drafts, and they for the GIL
    tree.append(request, previous, tokens);
}

}  // namespace

void bind_group_tree(nb::module_& m) {
    m.attr("MAX_DRAFT_TOKENS") = static_cast<uint32_t>(seer::ContextDrafter::kMaxTokens);
    nb::class_<Draft>(m, "Draft")
        .def_ro("token_ids", &Draft::token_ids)
        .def_ro("parents", &Draft::parents)
        .def_ro("scores", &Draft::scores)
        .def("__len__", [](const Draft& made) { return made.token_ids.size(); });
    const auto tokens = nb::arg("tokens").noconvert();
    const auto max_depth = nb::arg("max_depth").none() = nb::none();
    nb::class_<GroupTree>(m, "GroupTree")
        .def("__init__", [](GroupTree* place, const Tokens& prompt, size_t max_bytes) {
                new (place) GroupTree(span_of(prompt), max_bytes);
            }, nb::arg("prompt").noconvert(), nb::arg("max_bytes") = size_t{1} << 30)
        .def("__init__", [](GroupTree* place, const std::vector<int32_t>& prompt, size_t max_bytes) {
                new (place) GroupTree(prompt, max_bytes);
            }, nb::arg("prompt") = std::vector<int32_t>(), nb::arg("max_bytes") = size_t{1} << 30)
        .def("append", [](GroupTree& tree, int64_t request, int64_t previous, const Tokens& fresh) {
                append(tree, request, previous, span_of(fresh));
            }, nb::arg("request_id"), nb::arg("prev_token_count"), tokens)
        .def("append", [](GroupTree& tree, int64_t request, int64_t previous, const std::vector<int32_t>& fresh) {
                append(tree, request, previous, fresh);
            }, nb::arg("request_id"), nb::arg("prev_token_count"), nb::arg("tokens"))
        .def("draft", [](const GroupTree& tree, int64_t request, int64_t max_tokens, int64_t top_k, double min_score,
                         std::optional<int64_t> depth) {
                return draft(tree, options_of(max_tokens, top_k, min_score, depth), request);
            }, nb::arg("source"), nb::arg("max_tokens"), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0, max_depth)
        .def("draft", [](const GroupTree& tree, const Tokens& context, int64_t max_tokens, int64_t top_k,
                         double min_score, std::optional<int64_t> depth, int64_t own) {
                return draft(tree, options_of(max_tokens, top_k, min_score, depth), span_of(context), own);
            }, nb::arg("source").noconvert(), nb::arg("max_tokens"), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0,
            max_depth, nb::arg("own") = -1)
        .def("draft", [](const GroupTree& tree, const std::vector<int32_t>& context, int64_t max_tokens, int64_t top_k,
                         double min_score, std::optional<int64_t> depth, int64_t own) {
                return draft(tree, options_of(max_tokens, top_k, min_score, depth), std::span(context), own);
            }, nb::arg("source"), nb::arg("max_tokens"), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0, max_depth,
            nb::arg("own") = -1)
        .def("matches", [](const GroupTree& tree, const std::vector<int32_t>& context) { return tree.matches(context); },
             nb::arg("context"))
        .def("length", [](const GroupTree& tree, int64_t request) -> std::optional<int64_t> {
                const int64_t length = tree.length(request);
                return length < 0 ? std::nullopt : std::optional(length);
            }, nb::arg("request_id"))
        .def_prop_ro("bytes", &GroupTree::bytes)
        .def_prop_ro("tokens", &GroupTree::tokens);
}
