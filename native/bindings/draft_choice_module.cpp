// Python's view of the loops over drafted tokens: the draft budget's, and what a step verifies; see seer/_native.pyi.
//
// None of them releases the GIL: they take microseconds, and to get it back may take longer.
#include "bindings/modules.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>

#include "tree/draft_choice.hpp"

namespace nb = nanobind;

namespace {

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
template <class T>
using List = Array<const T, 1>;
template <class T>
using Table = Array<const T, 2>;

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

// Says so if a value is not 0 to limit - 1.
template <class T>
void check_below(const T* values, size_t count, size_t limit, const char* name) {
    const T* bad = std::find_if(values, values + count, [limit](T value) { return value < 0 || static_cast<size_t>(value) >= limit; });
    if (bad != values + count)
        throw std::invalid_argument(std::string(name) + " has " + std::to_string(*bad) + "; must be 0 to " + std::to_string(limit) + " - 1");
}

void rate_drafts(const Table<float>& scores, const List<int32_t>& lengths, const List<int64_t>& slots,
                 const List<float>& edges, const List<int64_t>& bases, const Table<double>& rates,
                 const Array<int32_t, 2>& out_cells, const Array<double, 2>& out_chances) {
    const size_t n = scores.shape(0), width = scores.shape(1), cells = rates.shape(1);
    require(lengths.shape(0) == n && slots.shape(0) == n, "scores, lengths and slots must have the same number of rows");
    require(bases.shape(0) >= width, "bases must have a place for each column of scores");
    require(out_cells.shape(0) == n && out_chances.shape(0) == n && out_cells.shape(1) == width && out_chances.shape(1) == width,
            "out_cells and out_chances must have the shape of scores");
    require(edges.shape(0) < cells, "rates must have more columns than there are edges");
    check_below(slots.data(), n, rates.shape(0), "slots");
    check_below(bases.data(), width, cells - edges.shape(0), "bases");
    seer::rate_drafts({n, width, scores.data(), lengths.data(), slots.data()},
                      {{edges.data(), edges.shape(0)}, bases.data(), rates.data(), cells}, out_cells.data(), out_chances.data());
}

void choose_drafts(const Table<double>& chances, const List<double>& seconds, double others, double price,
                      const std::optional<List<double>>& weights, const Array<int32_t, 1>& out_keep) {
    const size_t n = chances.shape(0), width = chances.shape(1);
    require(seconds.shape(0) > n * width, "seconds must reach from 0 to as many tokens as chances has");
    require(out_keep.shape(0) == n && (!weights || weights->shape(0) == n), "weights and out_keep must have a place for each row of chances");
    seer::choose_drafts({chances.data(), n * width}, width, weights ? weights->data() : nullptr, seconds.data(), others,
                               price, {out_keep.data(), n});
}

void count_drafts(const Table<int32_t>& cells, const List<int32_t>& keep, const List<int32_t>& accepted,
                  const List<int64_t>& slots, const Array<int64_t, 3>& fresh, const Array<int64_t, 3>& untold) {
    const size_t n = cells.shape(0), width = cells.shape(1);
    require(keep.shape(0) == n && accepted.shape(0) == n && slots.shape(0) == n, "cells, keep, accepted and slots must have the same number of rows");
    require(fresh.shape(1) == 2 && untold.shape(0) == fresh.shape(0) && untold.shape(1) == 2 && untold.shape(2) == fresh.shape(2),
            "fresh and untold must both be [slots, 2, cells]");
    check_below(slots.data(), n, fresh.shape(0), "slots");
    check_below(keep.data(), n, width + 1, "keep");
    check_below(cells.data(), n * width, fresh.shape(2), "cells");
    const std::array tallies{seer::Tally{fresh.data(), fresh.shape(2)}, seer::Tally{untold.data(), fresh.shape(2)}};
    for (size_t row = 0; row < n; ++row)
        for (int32_t k = 0; accepted(row) >= 0 && k < keep(row); ++k)
            for (const seer::Tally& tally : tallies) tally.add(slots(row), cells(row, static_cast<size_t>(k)), k < accepted(row));
}

void accept_drafts(const List<int32_t>& tokens, const List<float>& logprobs, const List<int32_t>& counts,
                   const List<int32_t>& drafts, int32_t rejected, const Array<int32_t, 2>& out_tokens,
                   const Array<float, 2>& out_logprobs) {
    const size_t n = counts.shape(0), width = out_tokens.shape(1);
    require(out_tokens.shape(0) == n && out_logprobs.shape(0) == n && out_logprobs.shape(1) == width, "out_tokens and out_logprobs must have a row for each count");
    check_below(counts.data(), n, width, "counts");
    size_t drafted = 0;
    for (size_t row = 0; row < n; ++row) drafted += static_cast<size_t>(counts(row));
    require(drafts.shape(0) == drafted && tokens.shape(0) == drafted + n && logprobs.shape(0) == drafted + n, "tokens and logprobs must have a place for each draft, and one for each request");
    const int32_t* draft = drafts.data();
    const int32_t* token = tokens.data();
    const float* logprob = logprobs.data();
    for (size_t row = 0; row < n; ++row) {
        const auto count = static_cast<size_t>(counts(row));
        int32_t* out = out_tokens.data() + row * width;
        size_t right = 0;
        while (right < count && token[right] == draft[right]) ++right;
        std::fill(std::copy_n(token, right + 1, out), out + width, rejected);
        float* values = out_logprobs.data() + row * width;
        std::fill(std::copy_n(logprob, count + 1, values), values + width, 0.0F);
        draft += count, token += count + 1, logprob += count + 1;
    }
}

// Lists for vLLM, of the first `keep` tokens of each draft. Slices of numpy's lists would take twice as many objects.
nb::list draft_lists(const Table<int32_t>& tokens, const List<int32_t>& keep) {
    const size_t n = tokens.shape(0), width = tokens.shape(1);
    require(keep.shape(0) == n, "token_ids and keep must have the same number of rows");
    check_below(keep.data(), n, width + 1, "keep");
    nb::list drafts;
    for (size_t row = 0; row < n; ++row) {
        nb::list draft;
        for (size_t k = 0; k < static_cast<size_t>(keep(row)); ++k) draft.append(tokens(row, k));
        drafts.append(draft);
    }
    return drafts;
}

}  // namespace

void bind_draft_choice(nb::module_& m) {
    m.def("rate_drafts", &rate_drafts, nb::arg("scores"), nb::arg("lengths"), nb::arg("slots"), nb::arg("edges"),
          nb::arg("bases"), nb::arg("rates"), nb::arg("out_cells").noconvert(), nb::arg("out_chances").noconvert());
    m.def("choose_drafts", &choose_drafts, nb::arg("chances"), nb::arg("seconds"), nb::arg("others"), nb::arg("price"),
          nb::arg("weights").none(), nb::arg("out_keep").noconvert());
    m.def("accept_drafts", &accept_drafts, nb::arg("tokens"), nb::arg("logprobs"), nb::arg("counts"), nb::arg("drafts"),
          nb::arg("rejected"), nb::arg("out_tokens").noconvert(), nb::arg("out_logprobs").noconvert());
    m.def("draft_lists", &draft_lists, nb::arg("token_ids").noconvert(), nb::arg("keep").noconvert());
    m.def("count_drafts", &count_drafts, nb::arg("cells"), nb::arg("keep"), nb::arg("accepted"), nb::arg("slots"),
          nb::arg("fresh").noconvert(), nb::arg("untold").noconvert());
}
