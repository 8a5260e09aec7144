// Position-keyed Gumbel sampling of a batch of rows on one CPU core.
//
// The result is specified in services/engine/vllm/sampling/torch_sampler.py, bit for bit in the tokens.
// Invariants:
// - a row's result depends on its own logits, record and history only: no state lives between calls;
// - logits are never modified.
#pragma once

#include <cstdint>
#include <span>

namespace seer {

enum class LogprobMode : int32_t { kScaled = 0, kRaw = 1, kProcessed = 2 };

// One row's parameters: RECORD in services/engine/vllm/sampling/rows.py, same order, no padding.
// The ragged fields index Batch's flat arrays.
struct Record {
    uint64_t key;
    int64_t position;  // of the sampled token; its history has as many tokens
    double top_p;
    float temperature;  // 0 is greedy
    float repetition, frequency, presence;
    float log_min_p;
    int32_t top_k;       // 0 keeps all
    int32_t prompt_len;  // original prompt, or all before the current turn
    int32_t min_tokens;
    int32_t slot;  // row of Batch::history
    LogprobMode logprobs;
    int32_t stop_start, stop_len;
    int32_t bias_start, bias_len;
    int32_t extra_start, extra_len;  // the last tokens of the history, not yet in Batch::history

    bool penalised() const { return repetition != 1.0f || frequency != 0.0f || presence != 0.0f; }
    bool masked() const { return stop_len > 0 && position - prompt_len < min_tokens; }
    bool edited() const { return penalised() || masked() || bias_len > 0; }
    bool truncated() const { return top_k > 0 || top_p < 1.0 || log_min_p > -1e30f; }
    float divisor() const { return temperature == 0.0f ? 1.0f : temperature; }
};
static_assert(sizeof(Record) == 88);

struct Batch {
    const float* logits;  // [rows, vocab]
    int64_t stride;       // floats from row to row
    int32_t vocab;
    std::span<const Record> records;
    std::span<const int32_t> stop_ids, bias_ids;
    std::span<const float> bias_values;
    const int32_t* history;  // [slots, ...], may be null when no row has penalties
    int64_t slots, history_stride, history_len;
    std::span<const int32_t> extra;
};

// Throws std::invalid_argument naming the row when a record points outside the batch's arrays.
void check(const Batch& batch);

// Writes tokens[rows] and logprobs[rows]. A row whose logits hold NaN, whose largest raw or processed
// logit is infinite, or that has no token left gets token -1 and a NaN logprob.
void sample(const Batch& batch, int32_t* tokens, float* logprobs);

}  // namespace seer
