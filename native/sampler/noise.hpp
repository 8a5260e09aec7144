// Scalar reference of the noise specification in services/engine/vllm/sampling/torch_sampler.py.
//
// Invariant: every float operation here is one IEEE-754 binary32 operation, in the order written
// (the target is compiled with -ffp-contract=off), so the results are the same bits on every
// machine and the same as the torch implementation's.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace seer {

inline constexpr uint32_t kPhiloxMul0 = 0xD2511F53u, kPhiloxMul1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9E3779B9u, kPhiloxWeyl1 = 0xBB67AE85u;
inline constexpr int kPhiloxRounds = 10;

// Philox4x32-10 (Salmon et al., SC 2011).
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> c, uint64_t key) {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t p0 = uint64_t{kPhiloxMul0} * c[0], p1 = uint64_t{kPhiloxMul1} * c[2];
        c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
             static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
        k0 += kPhiloxWeyl0;
        k1 += kPhiloxWeyl1;
    }
    return c;
}

// The word that belongs to one token.
inline uint32_t noise_word(uint64_t key, int64_t position, int32_t token) {
    const auto p = static_cast<uint64_t>(position);
    const auto t = static_cast<uint32_t>(token);
    return philox({t / 4, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32), 0}, key)[t % 4];
}

// Exponent and fraction of a positive normal x = 2^e (1 + f), with 1 + f in [sqrt(1/2), sqrt(2)).
struct Split {
    float e, f;
};

inline Split split(float x) {
    constexpr uint32_t kSqrtHalf = 0x3F3504F3u;
    const uint32_t offset = std::bit_cast<uint32_t>(x) - kSqrtHalf;
    const float mantissa = std::bit_cast<float>((offset & 0x007FFFFFu) + kSqrtHalf);
    return {static_cast<float>(static_cast<int32_t>(offset) >> 23), mantissa - 1.0f};
}

// log(2^e (1 + f)): the polynomial of Cephes' logf.
inline float log_split(float e, float f) {
    constexpr std::array<float, 8> kTail = {
        -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
        -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
    const float z = f * f;
    float y = 7.0376836292e-2f;
    for (const float c : kTail) y = y * f + c;
    y = y * f;
    y = y * z;
    y = y + e * -2.12194440e-4f;
    y = y - 0.5f * z;
    return (f + y) + e * 0.693359375f;
}

// Gumbel variate of a Philox word: -log(-log1p(-v)), v the word's place in (0, 1).
inline float gumbel(uint32_t word) {
    float v = (static_cast<float>(word) + 0.5f) * 0x1p-32f;
    v = v < 0x1.fffffep-1f ? v : 0x1.fffffep-1f;
    const Split outer = split(1.0f - v);
    // 1 - v rounds away the low bits of a small v: near 1 the fraction is -v itself.
    const float exponential = -log_split(outer.e, outer.e == 0.0f ? -v : outer.f);
    const Split inner = split(exponential);
    return -log_split(inner.e, inner.f);
}

inline constexpr std::array<float, 6> kExpPoly = {1.9875691500e-4f, 1.3981999507e-3f,
                                                  8.3334519073e-3f, 4.1665795894e-2f,
                                                  1.6666665459e-1f, 5.0000001201e-1f};
inline constexpr float kLog2E = 1.44269504088896341f;
inline constexpr float kLn2Hi = 0.693359375f, kLn2Lo = -2.12194440e-4f;
inline constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
inline constexpr float kExpMin = -87.0f;      // exp of it is the last that is no denormal
inline constexpr float kWeightOne = 0x1p30f;  // weight of the most likely token

// exp(y) for y <= 0: the polynomial of Cephes' expf.
inline float exp_poly(float y) {
    y = y > kExpMin ? y : kExpMin;
    const float shifted = y * kLog2E + kRound;
    const float n = shifted - kRound;
    float r = y - n * kLn2Hi;
    r = r - n * kLn2Lo;
    float p = kExpPoly[0];
    for (size_t i = 1; i < kExpPoly.size(); ++i) p = p * r + kExpPoly[i];
    p = p * (r * r);
    p = p + r;
    p = p + 1.0f;
    const uint32_t bits = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound);
    return p * std::bit_cast<float>((bits + 127u) << 23);
}

// Integer weight of a token in the top-p mass; sums of it do not depend on their order.
inline int32_t top_p_weight(float x, float row_max) {
    return static_cast<int32_t>(exp_poly(x - row_max) * kWeightOne);
}

}  // namespace seer
