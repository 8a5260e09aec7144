#include "sampler/select.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

#include "sampler/noise.hpp"

namespace seer {
namespace {

constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kWeightless = 21.0f;    // e^-21 * 2^30 < 1: tokens further below the maximum weigh nothing
constexpr int32_t kDirectBlocks = 64;   // up to here one radix select is cheaper than a histogram first

uint32_t image_of(float value) {
    const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

float value_of(uint32_t image) {
    return std::bit_cast<float>(image & 0x80000000u ? image & 0x7FFFFFFFu : ~image);
}

// The largest image whose items at or above it hold `needed` mass, 1 <= needed <= total. Most
// significant byte first; shrinks `items` to the ones that share the answer's prefix.
uint32_t radix_select(std::vector<Item>& items, int64_t needed) {
    for (int shift = 24; shift >= 0 && items.size() > 1; shift -= 8) {
        std::array<int64_t, 256> mass{};
        for (const Item& item : items) mass[(item.image >> shift) & 0xFF] += item.mass;
        uint32_t digit = 255;
        while (mass[digit] < needed) needed -= mass[digit--];
        std::erase_if(items, [=](const Item& item) { return ((item.image >> shift) & 0xFF) != digit; });
    }
    return items.front().image;
}

void fill_items(std::span<const float> values, SelectScratch& scratch, auto&& mass_of) {
    scratch.items.clear();
    for (const float value : values) {
        const auto mass = static_cast<uint32_t>(mass_of(value));
        if (mass > 0) scratch.items.push_back({image_of(value), mass});
    }
}

std::span<const float> gather(const Row& row, const Zone& zone, SelectScratch& scratch) {
    scratch.values.resize(static_cast<size_t>(row.vocab) + kBlock);
    const int32_t count = kernels().gather(row, zone, scratch.values.data());
    return {scratch.values.data(), static_cast<size_t>(count)};
}

constexpr auto kOne = [](float) { return 1; };

// At least k tokens reach the k-th largest block maximum.
float top_k_floor(const Row& row, int32_t k, SelectScratch& scratch) {
    const auto blocks = static_cast<size_t>(block_count(row.vocab));
    if (static_cast<size_t>(k) > blocks) return kLowest;
    fill_items({row.block_max, blocks}, scratch, kOne);
    return std::max(kLowest, value_of(radix_select(scratch.items, k)));
}

int64_t needed_mass(double top_p, int64_t total) {
    return std::max<int64_t>(1, static_cast<int64_t>(std::ceil(top_p * static_cast<double>(total))));
}

}  // namespace

float top_k_cut(const Row& row, int32_t k, float keep, SelectScratch& scratch) {
    const Zone zone{std::max(keep, top_k_floor(row, k, scratch)), 0.0f, 0};
    const auto values = gather(row, zone, scratch);
    if (values.size() < static_cast<size_t>(k)) return keep;
    fill_items(values, scratch, kOne);
    return value_of(radix_select(scratch.items, k));
}

float top_p_cut(const Row& row, double top_p, float keep, SelectScratch& scratch) {
    Zone zone{std::max(keep, row.max - kWeightless), 0.0f, 0};
    const auto blocks = std::span(row.block_max, static_cast<size_t>(block_count(row.vocab)));
    const auto live = std::ranges::count_if(blocks, [&](float top) { return top >= zone.floor; });
    const auto weigh = [&](float x) { return top_p_weight(x, row.max); };
    if (live <= kDirectBlocks) {
        fill_items(gather(row, zone, scratch), scratch, weigh);
        const auto total = std::accumulate(scratch.items.begin(), scratch.items.end(), int64_t{0},
                                           [](int64_t sum, const Item& item) { return sum + item.mass; });
        return value_of(radix_select(scratch.items, needed_mass(top_p, total)));
    }
    zone.bin_scale = kBins / kWeightless;
    scratch.bins.assign(kBins, 0);
    kernels().histogram(row, zone, scratch.bins.data());
    int64_t needed = needed_mass(top_p, std::accumulate(scratch.bins.begin(), scratch.bins.end(), int64_t{0}));
    while (scratch.bins[static_cast<size_t>(zone.bin)] < needed)
        needed -= scratch.bins[static_cast<size_t>(zone.bin++)];
    fill_items(gather(row, zone, scratch), scratch, weigh);
    return value_of(radix_select(scratch.items, needed));
}

}  // namespace seer
