// Python's view of the group tree; described in seer/_native.pyi.
#include "bindings/tree_module.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "drafts/row_draft.hpp"
#include "tree/drafter.hpp"
#include "tree/group_tree.hpp"

namespace nb = nanobind;

namespace {

using seer::DraftOptions;
using seer::GroupTree;

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Buffer = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Out = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

struct Draft {
    std::vector<int32_t> token_ids, parents;
    std::vector<float> scores;
};

std::span<const int32_t> span_of(const Tokens& tokens) { return {tokens.data(), tokens.shape(0)}; }

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

DraftOptions options_of(int64_t max_tokens, int64_t top_k, double min_score, std::optional<int64_t> max_depth) {
    const int64_t depth = max_depth.value_or(seer::Drafter::kMaxTokens);
    if (max_tokens < 0 || max_tokens > seer::Drafter::kMaxTokens)
        refuse("max_tokens is " + std::to_string(max_tokens) + "; must be 0 to " +
               std::to_string(seer::Drafter::kMaxTokens));
    if (top_k < 1 || top_k > UINT32_MAX) refuse("top_k is " + std::to_string(top_k) + "; must be at least 1");
    if (depth < 1 || depth > UINT32_MAX) refuse("max_depth is " + std::to_string(depth) + "; must be at least 1");
    if (!(min_score >= 0.0 && min_score <= 1.0))
        refuse("min_score is " + std::to_string(min_score) + "; must be 0 to 1");
    return {static_cast<uint32_t>(max_tokens), static_cast<uint32_t>(top_k), static_cast<uint32_t>(depth), min_score};
}

template <class Source>
Draft draft(const GroupTree& tree, const Source& source, const DraftOptions& options) {
    Draft made{std::vector<int32_t>(options.max_tokens), std::vector<int32_t>(options.max_tokens),
               std::vector<float>(options.max_tokens)};
    const seer::DraftView view{made.token_ids, made.parents, made.scores};
    uint32_t count = 0;
    if constexpr (std::is_same_v<Source, int64_t>)
        count = tree.draft(source, options, view);
    else
        count = tree.draft(source, -1, options, view);
    made.token_ids.resize(count);
    made.parents.resize(count);
    made.scores.resize(count);
    return made;
}

// The arrays of draft_batch, all of one length n but for the token buffer's.
struct Batch {
    std::vector<GroupTree*> trees;
    Ids request_ids;
    Tokens rows;
    Buffer token_ids;
    Tokens prompt_lengths, lengths, appended, max_tokens;
    Out<int32_t> out_token_ids;
    Counts out_counts;
    std::optional<Out<int32_t>> out_parents;
    std::optional<Out<float>> out_scores;
    GroupTree* common;
    std::optional<Ids> common_ids;

    void check() const {
        const size_t n = trees.size();
        const auto same = [n](size_t size, const char* name) {
            if (size != n) refuse(std::string(name) + " has " + std::to_string(size) + " rows for " + std::to_string(n) + " trees");
        };
        same(request_ids.shape(0), "request_ids");
        same(rows.shape(0), "rows");
        same(appended.shape(0), "appended");
        same(max_tokens.shape(0), "max_tokens");
        same(out_token_ids.shape(0), "out_token_ids");
        same(out_counts.shape(0), "out_counts");
        if (out_parents) same(out_parents->shape(0), "out_parents");
        if (out_scores) same(out_scores->shape(0), "out_scores");
        if (common != nullptr && !common_ids) refuse("common needs common_ids");
        if (common_ids) same(common_ids->shape(0), "common_ids");
        const size_t width = out_token_ids.shape(1);
        if ((out_parents && out_parents->shape(1) != width) || (out_scores && out_scores->shape(1) != width))
            refuse("out_token_ids, out_parents and out_scores must have the same shape");
        if (token_ids.shape(1) > 1 && token_ids.stride(1) != 1) refuse("token_ids must have a column stride of 1");
        if (prompt_lengths.shape(0) != token_ids.shape(0) || lengths.shape(0) != token_ids.shape(0))
            refuse("prompt_lengths and lengths must have a place for each row of token_ids");
        for (size_t i = 0; i < n; ++i) check_row(i, width);
    }

    void check_row(size_t i, size_t width) const {
        const auto bad = [i](const char* what, int64_t value) {
            refuse(std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(value) + ": out of range");
        };
        const int64_t row = rows(i);
        if (row < 0 || row >= static_cast<int64_t>(token_ids.shape(0))) bad("rows", row);
        const int64_t prompt = prompt_lengths(row), length = lengths(row);
        if (length < 0 || length > static_cast<int64_t>(token_ids.shape(1))) bad("lengths of rows", length);
        if (prompt < 0 || prompt > length) bad("prompt_lengths of rows", prompt);
        if (appended(i) < 0 || appended(i) > length - prompt) bad("appended", appended(i));
        if (max_tokens(i) < 0 || max_tokens(i) > static_cast<int64_t>(std::min<size_t>(width, seer::Drafter::kMaxTokens)))
            bad("max_tokens", max_tokens(i));
    }

    void run(DraftOptions options) const {
        for (size_t i = 0; i < trees.size(); ++i) {
            const auto row = static_cast<size_t>(rows(i));
            const int32_t* tokens = token_ids.data() + static_cast<int64_t>(row) * token_ids.stride(0);
            const auto length = static_cast<size_t>(lengths(row));
            const auto known = static_cast<size_t>(prompt_lengths(row)) + static_cast<size_t>(appended(i));
            const std::span<const int32_t> fresh{tokens + known, length - known};
            options.max_tokens = static_cast<uint32_t>(max_tokens(i));
            const auto part = [&](auto& array) {
                return std::span(array.data() + i * out_token_ids.shape(1), options.max_tokens);
            };
            seer::DraftView view{part(out_token_ids), {}, {}};
            if (out_parents) view.parents = part(*out_parents);
            if (out_scores) view.scores = part(*out_scores);
            const seer::Said group{trees[i], request_ids(i), appended(i), fresh};
            const seer::Said all{common, common != nullptr ? (*common_ids)(i) : -1, appended(i), fresh};
            out_counts(i) = static_cast<int32_t>(seer::append_and_draft(group, all, {tokens, length}, options, view));
        }
    }
};

void draft_batch(const std::vector<nb::object>& trees, Ids request_ids, Tokens rows, Buffer token_ids,
                 Tokens prompt_lengths, Tokens lengths, Tokens appended, Tokens max_tokens, Out<int32_t> out_token_ids,
                 Counts out_counts, std::optional<Out<int32_t>> out_parents, std::optional<Out<float>> out_scores,
                 int64_t top_k, double min_score, std::optional<int64_t> max_depth, GroupTree* common,
                 std::optional<Ids> common_ids) {
    if (common != nullptr && !out_scores) refuse("common needs out_scores, to tell which draft is better");
    Batch batch{{}, request_ids, rows, token_ids, prompt_lengths, lengths, appended, max_tokens, out_token_ids,
                out_counts, out_parents, out_scores, common, common_ids};
    for (const nb::object& tree : trees) batch.trees.push_back(nb::cast<GroupTree*>(tree));
    const DraftOptions options = options_of(0, top_k, min_score, max_depth);
    batch.check();
    const nb::gil_scoped_release release;
    batch.run(options);
}

void append(GroupTree& tree, int64_t request, int64_t previous, std::span<const int32_t> tokens) {
    const nb::gil_scoped_release release;  // an append may wait for drafts, and they for the GIL
    tree.append(request, previous, tokens);
}

}  // namespace

void bind_group_tree(nb::module_& m) {
    m.attr("MAX_DRAFT_TOKENS") = static_cast<uint32_t>(seer::Drafter::kMaxTokens);
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
                return draft(tree, request, options_of(max_tokens, top_k, min_score, depth));
            }, nb::arg("source"), nb::arg("max_tokens"), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0, max_depth)
        .def("draft", [](const GroupTree& tree, const Tokens& context, int64_t max_tokens, int64_t top_k,
                         double min_score, std::optional<int64_t> depth) {
                return draft(tree, span_of(context), options_of(max_tokens, top_k, min_score, depth));
            }, nb::arg("source").noconvert(), nb::arg("max_tokens"), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0,
            max_depth)
        .def("draft", [](const GroupTree& tree, const std::vector<int32_t>& context, int64_t max_tokens, int64_t top_k,
                         double min_score, std::optional<int64_t> depth) {
                return draft(tree, std::span<const int32_t>(context), options_of(max_tokens, top_k, min_score, depth));
            }, nb::arg("source"), nb::arg("max_tokens"), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0, max_depth)
        .def("matches", [](const GroupTree& tree, const std::vector<int32_t>& context) { return tree.matches(context); },
             nb::arg("context"))
        .def("length", [](const GroupTree& tree, int64_t request) -> std::optional<int64_t> {
                const int64_t length = tree.length(request);
                return length < 0 ? std::nullopt : std::optional(length);
            }, nb::arg("request_id"))
        .def_prop_ro("bytes", &GroupTree::bytes)
        .def_prop_ro("tokens", &GroupTree::tokens);
    m.def("draft_batch", &draft_batch, nb::arg("trees"), nb::arg("request_ids").noconvert(),
          nb::arg("rows").noconvert(), nb::arg("token_ids").noconvert(), nb::arg("prompt_lengths").noconvert(),
          nb::arg("lengths").noconvert(), nb::arg("appended").noconvert(), nb::arg("max_tokens").noconvert(),
          nb::arg("out_token_ids").noconvert(), nb::arg("out_counts").noconvert(),
          nb::arg("out_parents").noconvert().none() = nb::none(),
          nb::arg("out_scores").noconvert().none() = nb::none(), nb::arg("top_k") = 1, nb::arg("min_score") = 0.0,
          max_depth, nb::arg("common").none() = nb::none(), nb::arg("common_ids").noconvert().none() = nb::none());
}
