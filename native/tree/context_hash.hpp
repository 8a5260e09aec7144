// Hashes of the last 1, 2, ... tokens before a place, from one pass over them.
#pragma once

#include <array>
#include <cstdint>

namespace seer {

// A polynomial hash of the tokens so far: that of any context within is a difference of two of them.
inline constexpr uint64_t kBase = 0x9E3779B97F4A7C15;
inline uint64_t prefix_hash(uint64_t hash, int32_t token) { return hash * kBase + static_cast<uint32_t>(token) + 1; }

template <size_t kLevelCount>
constexpr std::array<uint64_t, kLevelCount> powers_of_base(const std::array<uint32_t, kLevelCount>& exponents) {
    std::array<uint64_t, kLevelCount> powers{};
    for (size_t i = 0; i < kLevelCount; ++i) {
        powers[i] = 1;
        for (uint32_t k = 0; k < exponents[i]; ++k) powers[i] *= kBase;
    }
    return powers;
}

// The hash of the `length` tokens between two prefixes; `power` is kBase^length.
inline uint32_t context_hash(uint64_t before, uint64_t after, uint64_t power, uint32_t length) {
    uint64_t h = after - before * power + length * 0xD1B54A32D192ED03;
    h = (h ^ h >> 32) * 0xBF58476D1CE4E5B9;
    h = (h ^ h >> 29) * 0x94D049BB133111EB;
    return static_cast<uint32_t>(h >> 32);
}

}  // namespace seer
