#include "sampler/sampler.hpp"

#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "sampler/simd_kernels.hpp"
#include "sampler/select.hpp"

namespace seer {
namespace {

// A row together with the storage of its block statistics.
class RowBuffer {
public:
    // Returns false when the row holds a NaN or its maximum is not finite.
    bool scan(const float* x, int32_t vocab) {
        const auto padded = static_cast<size_t>(block_count(vocab)) + 8;
        block_max_.assign(padded, -kInf);
        bound_.resize(padded);
        const Scan found = kernels().scan(x, vocab, block_max_.data());
        row_ = {x, vocab, block_max_.data(), found.max, bound_.data()};
        return !found.has_nan && std::isfinite(found.max);
    }
    void bound(float temperature) {
        kernels().bounds(row_.block_max, block_count(row_.vocab), row_.max, temperature, bound_.data());
    }
    const Row& row() const { return row_; }

private:
    Row row_{};
    std::vector<float> block_max_, bound_;
};

struct Scratch {
    RowBuffer raw, processed;
    std::vector<float> edited;
    std::vector<uint32_t> seen;  // [vocab] 2 * occurrences in the output + 1 if in the prompt; zero between rows
    std::vector<int32_t> touched;
    SelectScratch select;
};

template <class T>
std::span<const T> slice(std::span<const T> flat, int32_t start, int32_t len) {
    return flat.subspan(static_cast<size_t>(start), static_cast<size_t>(len));
}

void penalise(const Batch& batch, const Record& record, Scratch& scratch) {
    scratch.seen.resize(static_cast<size_t>(batch.vocab));
    scratch.touched.clear();
    int64_t index = 0;
    const auto see = [&](int32_t token) {
        const bool output = index++ >= record.prompt_len;
        if (token < 0 || token >= batch.vocab) return;  // padding drafts
        uint32_t& seen = scratch.seen[static_cast<size_t>(token)];
        if (seen == 0) scratch.touched.push_back(token);
        seen = output ? seen + 2 : seen | 1;
    };
    const int32_t* known = batch.history + record.slot * batch.history_stride;
    for (int64_t i = 0; i < record.position - record.extra_len; ++i) see(known[i]);
    for (const int32_t token : slice(batch.extra, record.extra_start, record.extra_len)) see(token);
    for (const int32_t token : scratch.touched) {
        float& x = scratch.edited[static_cast<size_t>(token)];
        const uint32_t count = scratch.seen[static_cast<size_t>(token)] / 2;
        scratch.seen[static_cast<size_t>(token)] = 0;
        x = x > 0.0f ? x / record.repetition : x * record.repetition;
        if (count == 0) continue;
        x = x - record.frequency * static_cast<float>(count);
        x = x - record.presence;
    }
}

void edit(const Batch& batch, const Record& record, const float* logits, Scratch& scratch) {
    scratch.edited.assign(logits, logits + batch.vocab);
    const auto inside = [&](int32_t token) { return token >= 0 && token < batch.vocab; };
    if (record.masked())
        for (const int32_t token : slice(batch.stop_ids, record.stop_start, record.stop_len))
            if (inside(token)) scratch.edited[static_cast<size_t>(token)] = -kInf;
    const auto ids = slice(batch.bias_ids, record.bias_start, record.bias_len);
    const auto values = slice(batch.bias_values, record.bias_start, record.bias_len);
    for (size_t i = 0; i < ids.size(); ++i)
        if (inside(ids[i])) scratch.edited[static_cast<size_t>(ids[i])] += values[i];
    if (record.penalised()) penalise(batch, record, scratch);
}

float cut(const Row& row, const Record& record, SelectScratch& scratch) {
    float keep = row.max + record.log_min_p;
    if (record.top_k > 0 && record.top_k < row.vocab) keep = top_k_cut(row, record.top_k, keep, scratch);
    if (record.top_p < 1.0) keep = top_p_cut(row, record.top_p, keep, scratch);
    return keep;
}

double logprob(const Row& row, int32_t token, float temperature, float keep) {
    return (double{row.x[token]} - row.max) / temperature - std::log(kernels().exp_sum(row, temperature, keep));
}

struct Sampled {
    int32_t token = -1;
    float logprob = std::numeric_limits<float>::quiet_NaN();
};

Sampled sample_row(const Batch& batch, const Record& record, const float* logits, Scratch& scratch) {
    if (!scratch.raw.scan(logits, batch.vocab)) return {};
    const bool greedy = record.temperature == 0.0f;
    const bool processed = record.logprobs == LogprobMode::kProcessed;
    const bool truncated = record.truncated() && (!greedy || processed);
    // A plain row is never copied: the noise pass divides by the temperature as it goes.
    const bool plain = !record.edited() && (!truncated || record.divisor() == 1.0f);
    float temperature = record.divisor(), keep = -kInf;
    RowBuffer& buffer = plain ? scratch.raw : scratch.processed;
    if (plain) {
        if (!std::isfinite(buffer.row().max / temperature)) return {};
    } else {
        if (record.edited())
            edit(batch, record, logits, scratch);
        else
            scratch.edited.resize(static_cast<size_t>(batch.vocab));
        float* x = scratch.edited.data();
        kernels().scale(record.edited() ? x : logits, batch.vocab, temperature, x);
        temperature = 1.0f;
        if (!buffer.scan(x, batch.vocab)) return {};
    }
    buffer.bound(temperature);
    const Row& row = buffer.row();
    if (truncated) keep = cut(row, record, scratch.select);
    const Draw draw{record.key, record.position, temperature, keep};
    const int32_t token = greedy ? first_max(row) : kernels().noise_argmax(row, draw);
    if (processed) return {token, static_cast<float>(logprob(row, token, temperature, keep))};

    const float shown = record.logprobs == LogprobMode::kRaw ? 1.0f : record.divisor();
    if (!plain || shown != temperature) scratch.raw.bound(shown);
    return {token, static_cast<float>(logprob(scratch.raw.row(), token, shown, -kInf))};
}

void require(bool ok, size_t row, const char* what) {
    if (!ok) throw std::invalid_argument("row " + std::to_string(row) + ": " + what);
}

bool within(int32_t start, int32_t len, size_t size) {
    return start >= 0 && len >= 0 && static_cast<size_t>(start) + static_cast<size_t>(len) <= size;
}

}  // namespace

void check(const Batch& batch) {
    for (size_t i = 0; i < batch.records.size(); ++i) {
        const Record& r = batch.records[i];
        require(r.temperature >= 0.0f, i, "temperature must be >= 0");
        require(r.top_p > 0.0 && r.log_min_p <= 0.0f, i, "top_p must be > 0 and min_p at most 1");
        require(within(r.stop_start, r.stop_len, batch.stop_ids.size()), i, "stop ids out of range");
        require(within(r.bias_start, r.bias_len, batch.bias_ids.size()), i, "logit bias out of range");
        if (!r.penalised()) continue;
        require(batch.history != nullptr, i, "penalties need the token history");
        require(r.slot >= 0 && r.slot < batch.slots, i, "slot outside the token history");
        require(within(r.extra_start, r.extra_len, batch.extra.size()), i, "extra tokens out of range");
        const int64_t known = r.position - r.extra_len;
        require(known >= 0 && known <= batch.history_len, i, "position outside the token history");
    }
}

void sample(const Batch& batch, int32_t* tokens, float* logprobs) {
    thread_local Scratch scratch;
    for (size_t i = 0; i < batch.records.size(); ++i) {
        const float* logits = batch.logits + static_cast<int64_t>(i) * batch.stride;
        const Sampled sampled = sample_row(batch, batch.records[i], logits, scratch);
        tokens[i] = sampled.token;
        logprobs[i] = sampled.logprob;
    }
}

}  // namespace seer
