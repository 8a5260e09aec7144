// What vLLM's model runner V2 does to its tables in each step, for CPUs; see services/engine/vllm/cpu_kernels.py.
//
// Each function does what the Triton kernel of its name in vllm/v1/worker/gpu does, for all requests of a step. Tables
// come as addresses, which cost Python a tenth of an array; who calls answers for their types and sizes.
#include "bindings/modules.hpp"

#include <algorithm>
#include <cstdint>

namespace nb = nanobind;

namespace {

// Where an array begins; 0 for none.
template <class T>
struct At {
    T* data;
    T& operator[](int64_t i) const { return data[i]; }
};

template <class T>
At<T> at(uintptr_t address) {
    return {reinterpret_cast<T*>(address)};
}

using Address = uintptr_t;

void gather_block_tables(int64_t requests, Address idx_mapping, int64_t groups, Address sources, Address targets,
                         Address strides, Address num_blocks, int64_t num_blocks_stride) {
    const auto slots = at<int64_t>(idx_mapping);
    for (int64_t group = 0; group < groups; ++group) {
        const auto source = at<int32_t>(at<uint64_t>(sources)[group]), target = at<int32_t>(at<uint64_t>(targets)[group]);
        const int64_t stride = at<int64_t>(strides)[group];
        for (int64_t n = 0; n < requests; ++n)
            std::copy_n(source.data + slots[n] * stride, at<int32_t>(num_blocks)[group * num_blocks_stride + slots[n]],
                        target.data + n * stride);
    }
}

void compute_slot_mappings(int64_t requests, Address idx_mapping, Address query_start_loc, Address pos, int64_t groups,
                           Address tables, Address strides, Address block_sizes, Address enabled, Address slot_mappings,
                           int64_t width, int64_t pad) {
    const auto slots = at<int64_t>(idx_mapping);
    const auto starts = at<int32_t>(query_start_loc);
    for (int64_t group = 0; group < groups; ++group) {
        const auto mapping = at<int64_t>(slot_mappings + static_cast<uintptr_t>(group * width) * sizeof(int64_t));
        const auto table = at<int32_t>(at<uint64_t>(tables)[group]);
        const int64_t stride = at<int64_t>(strides)[group], size = at<int32_t>(block_sizes)[group];
        for (int64_t n = 0; n < requests; ++n)
            for (int64_t i = starts[n]; i < starts[n + 1]; ++i) {
                const int64_t place = at<int64_t>(pos)[i];
                mapping[i] = at<bool>(enabled)[group] && slots[n] >= 0
                                 ? table[slots[n] * stride + place / size] * size + place % size
                                 : pad;
            }
        std::fill(mapping.data + starts[requests], mapping.data + width, pad);
    }
}

void prepare_pos_seq_lens(int64_t requests, Address pos, Address seq_lens, int64_t rows, Address idx_mapping,
                          Address query_start_loc, Address num_computed) {
    const auto starts = at<int32_t>(query_start_loc), lens = at<int32_t>(seq_lens);
    for (int64_t n = 0; n < requests; ++n) {
        const int32_t done = at<int32_t>(num_computed)[at<int64_t>(idx_mapping)[n]];
        lens[n] = done + starts[n + 1] - starts[n];
        for (int64_t i = starts[n]; i < starts[n + 1]; ++i) at<int64_t>(pos)[i] = done + i - starts[n];
    }
    std::fill(lens.data + requests, lens.data + rows, 0);
}

void combine_sampled_and_draft_tokens(int64_t requests, Address input_ids, Address idx_mapping, Address last_sampled,
                                      Address query_start_loc, Address seq_lens, Address prefill_len, Address drafts,
                                      int64_t drafts_stride, Address cu_num_logits, Address logits_indices, int64_t fresh) {
    const auto ids = at<int32_t>(input_ids), logits_ends = at<int32_t>(cu_num_logits);
    for (int64_t n = 0; n < requests; ++n) {
        const int64_t slot = at<int64_t>(idx_mapping)[n], end = at<int32_t>(query_start_loc)[n + 1];
        const int64_t first = logits_ends[n], count = logits_ends[n + 1] - first;
        for (int64_t i = 0; i < count; ++i) at<int64_t>(logits_indices)[first + i] = end - count + i;
        const int64_t length = at<int32_t>(seq_lens)[n], goal = at<int32_t>(prefill_len)[slot], drafted = count - fresh;
        if (length <= goal) continue;
        if (fresh > 0 && length - count >= goal) ids[end - count] = static_cast<int32_t>(at<int64_t>(last_sampled)[slot]);
        for (int64_t i = 0; i < drafted; ++i)
            ids[end - drafted + i] = static_cast<int32_t>(at<int64_t>(drafts)[slot * drafts_stride + i]);
    }
}

void get_num_sampled_and_rejected(int64_t requests, Address num_sampled, Address num_rejected, Address seq_lens,
                                  Address cu_num_logits, Address idx_mapping, Address prefill_len) {
    for (int64_t n = 0; n < requests; ++n) {
        const bool ended = at<int32_t>(seq_lens)[n] >= at<int32_t>(prefill_len)[at<int64_t>(idx_mapping)[n]];
        const int32_t logits = at<int32_t>(cu_num_logits)[n + 1] - at<int32_t>(cu_num_logits)[n];
        int32_t& sampled = at<int32_t>(num_sampled)[n];
        sampled = ended ? sampled : 0;
        at<int32_t>(num_rejected)[n] = ended ? logits - sampled : 0;
    }
}

void post_update(int64_t requests, Address idx_mapping, Address num_computed, Address last_sampled, Address bin_counts,
                 int64_t bin_stride, Address sampled, int64_t sampled_stride, Address num_sampled, Address num_rejected,
                 Address query_start_loc, Address all_token_ids, int64_t ids_stride, Address total_len) {
    const auto starts = at<int32_t>(query_start_loc);
    for (int64_t n = 0; n < requests; ++n) {
        const int64_t slot = at<int64_t>(idx_mapping)[n];
        if (slot < 0) continue;
        int32_t& total = at<int32_t>(total_len)[slot];
        for (int32_t i = 0; i < at<int32_t>(num_sampled)[n]; ++i) {
            const int64_t token = at<int64_t>(sampled)[n * sampled_stride + i];
            at<int32_t>(all_token_ids)[slot * ids_stride + total++] = static_cast<int32_t>(token);
            at<int64_t>(last_sampled)[slot] = token;
            if (bin_counts != 0) ++at<int32_t>(bin_counts)[slot * bin_stride + token];
        }
        const int32_t computed = starts.data == nullptr ? 0 : starts[n + 1] - starts[n];
        at<int32_t>(num_computed)[slot] += computed - at<int32_t>(num_rejected)[n];
    }
}

void expand_idx_mapping(int64_t requests, Address idx_mapping, Address slots, Address places, Address cu_num_logits) {
    const auto ends = at<int32_t>(cu_num_logits);
    for (int64_t n = 0; n < requests; ++n)
        for (int32_t row = ends[n]; row < ends[n + 1]; ++row) {
            at<int64_t>(slots)[row] = at<int64_t>(idx_mapping)[n];
            at<int32_t>(places)[row] = row - ends[n];
        }
}

}  // namespace

void bind_runner_kernels(nb::module_& m) {
    nb::module_ kernels = m.def_submodule("runner_kernels");
    kernels.def("gather_block_tables", &gather_block_tables);
    kernels.def("compute_slot_mappings", &compute_slot_mappings);
    kernels.def("prepare_pos_seq_lens", &prepare_pos_seq_lens);
    kernels.def("combine_sampled_and_draft_tokens", &combine_sampled_and_draft_tokens);
    kernels.def("get_num_sampled_and_rejected", &get_num_sampled_and_rejected);
    kernels.def("post_update", &post_update);
    kernels.def("expand_idx_mapping", &expand_idx_mapping);
}
