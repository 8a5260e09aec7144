// Python's view of the step drafter; described in seer/_native.pyi.
//
// Whatever may wait for a step does so without the GIL, and trees are released with it.
#include "bindings/modules.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "drafts/step_drafter.hpp"

namespace nb = nanobind;

namespace {

using seer::GroupTree;
using seer::StepDrafter;

template <class T, int Dims>
using Array = nb::ndarray<T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;
using Tokens = Array<const int32_t, 1>;
using Ids = Array<const int64_t, 1>;
using Tree = std::shared_ptr<GroupTree>;

void require(bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument(what);
}

size_t slot_of(const StepDrafter& drafter, int64_t slot) {
    require(slot >= 0 && static_cast<size_t>(slot) < drafter.slots(),
            "slot is " + std::to_string(slot) + "; must be 0 to " + std::to_string(drafter.slots()) + " - 1");
    return static_cast<size_t>(slot);
}

int64_t set(StepDrafter& drafter, int64_t slot, Tree tree, int64_t index, int64_t common_name, int64_t prompt_length,
            const Tokens& tokens, int64_t limit, std::vector<int32_t> stop_ids, int32_t placeholder) {
    const std::span known(tokens.data(), tokens.shape(0));
    require(prompt_length >= 0 && static_cast<size_t>(prompt_length) <= known.size(),
            "prompt_length is " + std::to_string(prompt_length) + " of " + std::to_string(known.size()) + " tokens");
    for (size_t i = 0; i < known.size(); ++i)
        require(known[i] >= 0, "tokens[" + std::to_string(i) + "] is " + std::to_string(known[i]) + "; token ids are not negative");
    const size_t at = slot_of(drafter, slot);
    const seer::SlotRequest request{std::move(tree), index, common_name, static_cast<size_t>(prompt_length), known, limit,
                                    std::move(stop_ids), placeholder};
    Tree before;
    const nb::gil_scoped_release release;
    return drafter.set(at, request, before);
}

void clear(StepDrafter& drafter, int64_t slot) {
    const size_t at = slot_of(drafter, slot);
    Tree before;
    const nb::gil_scoped_release release;
    drafter.clear(at, before);
}

void use_common(StepDrafter& drafter, Tree tree) {
    const nb::gil_scoped_release release;
    drafter.use_common(tree);
}

void feed(StepDrafter& drafter, GroupTree& tree, int64_t request, int64_t previous, std::span<const int32_t> tokens) {
    const nb::gil_scoped_release release;
    drafter.feed(tree, request, previous, tokens);
}

// A step, and what keeps its memory.
class DraftStep {
  public:
    DraftStep(StepDrafter& drafter, Tokens slots, Ids generations, Array<const int32_t, 2> sampled, Tokens num_sampled,
              Array<int32_t, 2> drafts, Array<int32_t, 1> counts, Array<float, 2> scores, int64_t paths,
              std::optional<Array<int32_t, 2>> parents)
        : kept_(slots, generations, sampled, num_sampled, drafts, counts, scores, parents),
          step_{&drafter, slots.shape(0), sampled.shape(1), drafts.shape(1), slots.data(), generations.data(),
                sampled.data(), num_sampled.data(), drafts.data(), counts.data(), scores.data()} {
        const auto rows = [this](size_t size, const char* name) {
            require(size == step_.n, std::string(name) + " has " + std::to_string(size) + " rows for " + std::to_string(step_.n) + " slots");
        };
        rows(generations.shape(0), "generations");
        rows(sampled.shape(0), "sampled");
        rows(num_sampled.shape(0), "num_sampled");
        rows(drafts.shape(0), "out_drafts");
        rows(counts.shape(0), "out_counts");
        rows(scores.shape(0), "out_scores");
        require(scores.shape(1) == step_.k, "out_drafts and out_scores must have the same shape");
        require(paths >= 1, "paths is " + std::to_string(paths) + "; must be 1 or more");
        step_.paths = static_cast<size_t>(paths);
        if (parents) {
            require(parents->shape(0) == step_.n && parents->shape(1) == step_.k, "out_drafts and out_parents must have the same shape");
            step_.parents = parents->data();
        }
        require(!step_.is_flat() || step_.k == 0 || (step_.k + 1) % step_.paths == 0,
                "paths is " + std::to_string(paths) + "; must divide the " + std::to_string(step_.k) + " columns of out_drafts, and one more");
    }

    void run() {
        const nb::gil_scoped_release release;
        seer::run_step(&step_);
    }
    uintptr_t address() const { return reinterpret_cast<uintptr_t>(&step_); }

  private:
    std::tuple<Tokens, Ids, Array<const int32_t, 2>, Tokens, Array<int32_t, 2>, Array<int32_t, 1>, Array<float, 2>,
               std::optional<Array<int32_t, 2>>> kept_;
    seer::Step step_;
};

}  // namespace

void bind_step_drafter(nb::module_& m) {
    m.attr("RUN_DRAFT_STEP") = reinterpret_cast<uintptr_t>(&seer::run_step);
    nb::class_<StepDrafter>(m, "StepDrafter")
        .def("__init__", [](StepDrafter* place, size_t slots, double patience) {
                require(patience >= 0.0 && patience <= 1.0, "patience is " + std::to_string(patience) + "; must be 0 to 1 s");
                new (place) StepDrafter(slots, std::chrono::nanoseconds(static_cast<int64_t>(patience * 1e9)));
            }, nb::arg("slots"), nb::arg("patience") = 1e-4)
        .def("set", &set, nb::arg("slot"), nb::arg("tree").none(), nb::arg("index"), nb::arg("common_name"),
             nb::arg("prompt_length"), nb::arg("tokens").noconvert(), nb::arg("limit"),
             nb::arg("stop_ids") = std::vector<int32_t>(), nb::arg("placeholder") = -1)
        .def("clear", &clear, nb::arg("slot"))
        .def("use_common", &use_common, nb::arg("tree").none())
        .def("feed", [](StepDrafter& drafter, GroupTree& tree, int64_t request, int64_t previous, const Tokens& tokens) {
                feed(drafter, tree, request, previous, {tokens.data(), tokens.shape(0)});
            }, nb::arg("tree"), nb::arg("request_id"), nb::arg("prev_token_count"), nb::arg("tokens").noconvert())
        .def("feed", [](StepDrafter& drafter, GroupTree& tree, int64_t request, int64_t previous,
                        const std::vector<int32_t>& tokens) { feed(drafter, tree, request, previous, tokens); },
             nb::arg("tree"), nb::arg("request_id"), nb::arg("prev_token_count"), nb::arg("tokens"))
        .def("stall", [](StepDrafter& drafter, double seconds) {
                require(seconds >= 0.0 && seconds <= 1.0, "seconds is " + std::to_string(seconds) + "; must be 0 to 1 s");
                drafter.stall(std::chrono::nanoseconds(static_cast<int64_t>(seconds * 1e9)));
            }, nb::arg("seconds"))
        .def_prop_ro("refused", &StepDrafter::refused)
        .def_prop_ro("missed", &StepDrafter::missed)
        .def_prop_ro("seconds", [](const StepDrafter& drafter) { return static_cast<double>(drafter.nanoseconds()) * 1e-9; })
        .def_prop_ro("waited", [](const StepDrafter& drafter) { return static_cast<double>(drafter.waited()) * 1e-9; });
    nb::class_<DraftStep>(m, "DraftStep")
        .def(nb::init<StepDrafter&, Tokens, Ids, Array<const int32_t, 2>, Tokens, Array<int32_t, 2>, Array<int32_t, 1>,
                      Array<float, 2>, int64_t, std::optional<Array<int32_t, 2>>>(),
             nb::keep_alive<1, 2>(), nb::arg("drafter"), nb::arg("slots").noconvert(), nb::arg("generations").noconvert(),
             nb::arg("sampled").noconvert(), nb::arg("num_sampled").noconvert(), nb::arg("out_drafts").noconvert(),
             nb::arg("out_counts").noconvert(), nb::arg("out_scores").noconvert(),
             nb::arg("paths") = 1, nb::arg("out_parents").noconvert().none() = nb::none())
        .def("run", &DraftStep::run)
        .def_prop_ro("address", &DraftStep::address);
}
