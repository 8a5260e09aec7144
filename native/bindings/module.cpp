#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <optional>
#include <utility>

#include "bindings/modules.hpp"
#include "sampler/simd_kernels.hpp"
#include "sampler/sampler.hpp"

namespace nb = nanobind;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;
using Records = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const int32_t, nb::ndim<2>, nb::device::cpu>;
template <class T>
using Flat = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
std::span<const T> span_of(const std::optional<Flat<T>>& array) {
    return array ? std::span<const T>(array->data(), array->shape(0)) : std::span<const T>();
}

template <class T>
Result<T> hand_over(std::unique_ptr<T[]> data, size_t size) {
    T* raw = data.release();
    nb::capsule owner(raw, [](void* p) noexcept { delete[] static_cast<T*>(p); });
    return Result<T>(raw, {size}, owner);
}

std::span<const seer::Record> records_of(const Records& records) {
    const auto* data = reinterpret_cast<const seer::Record*>(records.data());
    if (records.shape(1) != sizeof(seer::Record))
        throw nb::value_error("records must be uint8[rows, RECORD_SIZE]");
    if (reinterpret_cast<uintptr_t>(data) % alignof(seer::Record) != 0)
        throw nb::value_error("records must be aligned to 8 bytes");
    return {data, records.shape(0)};
}

std::pair<Result<int32_t>, Result<float>> sample(
    const Logits& logits, const Records& records, const std::optional<Flat<int32_t>>& stop_ids,
    const std::optional<Flat<int32_t>>& bias_ids, const std::optional<Flat<float>>& bias_values,
    const std::optional<Matrix>& history, const std::optional<Flat<int32_t>>& extra) {
    const size_t rows = logits.shape(0);
    if (logits.shape(1) == 0 || logits.shape(1) > INT32_MAX - seer::kBlock)
        throw nb::value_error("logits must have 1 to 2^31 - 33 columns");
    if (logits.shape(1) > 1 && logits.stride(1) != 1) throw nb::value_error("logits must have a column stride of 1");
    if (history && history->shape(1) > 1 && history->stride(1) != 1)
        throw nb::value_error("history must have a column stride of 1");
    seer::Batch batch{};
    batch.logits = logits.data();
    batch.stride = logits.stride(0);
    batch.vocab = static_cast<int32_t>(logits.shape(1));
    batch.records = records_of(records);
    batch.stop_ids = span_of(stop_ids);
    batch.bias_ids = span_of(bias_ids);
    batch.bias_values = span_of(bias_values);
    batch.extra = span_of(extra);
    if (batch.records.size() != rows) throw nb::value_error("logits and records must have the same number of rows");
    if (batch.bias_ids.size() != batch.bias_values.size())
        throw nb::value_error("bias_ids and bias_values must have the same length");
    if (history) {
        batch.history = history->data();
        batch.slots = static_cast<int64_t>(history->shape(0));
        batch.history_stride = history->stride(0);
        batch.history_len = static_cast<int64_t>(history->shape(1));
    }
    auto tokens = std::make_unique_for_overwrite<int32_t[]>(rows);
    auto logprobs = std::make_unique_for_overwrite<float[]>(rows);
    {
        nb::gil_scoped_release release;
        seer::check(batch);
        seer::sample(batch, tokens.get(), logprobs.get());
    }
    return {hand_over(std::move(tokens), rows), hand_over(std::move(logprobs), rows)};
}

}  // namespace

NB_MODULE(_native, m) {
    m.attr("RECORD_SIZE") = sizeof(seer::Record);
    m.attr("INSTRUCTION_SET") = seer::kernels_name();
    m.def("sample", &sample, nb::arg("logits"), nb::arg("records"), nb::arg("stop_ids").none() = nb::none(),
          nb::arg("bias_ids").none() = nb::none(), nb::arg("bias_values").none() = nb::none(),
          nb::arg("history").none() = nb::none(), nb::arg("extra").none() = nb::none(),
          "Sample one token per row; see seer/_native.pyi.");
    bind_group_tree(m);
    bind_draft_choice(m);
    bind_step_drafter(m);
    bind_runner_kernels(m);
}
