// Included by simd_kernels.cpp once per instruction set, inside a namespace of its own.

#define SEER_INLINE [[gnu::always_inline]] inline

SEER_INLINE f32x8 all(float value) { return f32x8{} + value; }
SEER_INLINE f32x8 load(const float* p) {
    f32x8 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
SEER_INLINE void store(float* p, f32x8 v) { std::memcpy(p, &v, sizeof v); }

#if SEER_AVX2
SEER_INLINE u64x4 mul_low32(u64x4 a, uint32_t b) {
    return (u64x4)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
}
SEER_INLINE f32x8 max8(f32x8 a, f32x8 b) { return (f32x8)_mm256_max_ps((__m256)a, (__m256)b); }
SEER_INLINE uint32_t mask8(i32x8 m) {
    return static_cast<uint32_t>(_mm256_movemask_ps((__m256)m));
}
SEER_INLINE u32x8 min8(u32x8 a, u32x8 b) {
    return (u32x8)_mm256_min_epu32((__m256i)a, (__m256i)b);
}
#else
SEER_INLINE u64x4 mul_low32(u64x4 a, uint32_t b) {
#if defined(__SSE2__)
    __m128i half[2];
    std::memcpy(half, &a, sizeof half);
    const __m128i factor = _mm_set1_epi64x(b);
    half[0] = _mm_mul_epu32(half[0], factor);
    half[1] = _mm_mul_epu32(half[1], factor);
    std::memcpy(&a, half, sizeof half);
    return a;
#else
    return (a & 0xFFFFFFFFu) * b;
#endif
}
SEER_INLINE f32x8 max8(f32x8 a, f32x8 b) { return a > b ? a : b; }
SEER_INLINE uint32_t mask8(i32x8 m) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 8; ++lane) bits |= static_cast<uint32_t>(m[lane] < 0) << lane;
    return bits;
}
SEER_INLINE u32x8 min8(u32x8 a, u32x8 b) { return a < b ? a : b; }
#endif

// Block b of a row: in place, or its short last block copied into `pad` and filled up with -inf.
SEER_INLINE const float* block_of(const float* x, int32_t vocab, int32_t b, float* pad) {
    const int32_t start = b * kBlock, count = vocab - start;
    if (count >= kBlock) [[likely]]
        return x + start;
    for (int32_t i = 0; i < kBlock; ++i) pad[i] = i < count ? x[start + i] : -kInf;
    return pad;
}

SEER_INLINE float largest(f32x8 v) {
    float lane[8];
    store(lane, v);
    for (int width = 4; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
    return lane[0];
}

Scan scan(const float* x, int32_t vocab, float* block_max) {
    float pad[kBlock];
    f32x8 row_max = all(-kInf);
    i32x8 nan{};
    const int32_t blocks = block_count(vocab);
    for (int32_t b = 0; b < blocks; ++b) {
        const float* p = block_of(x, vocab, b, pad);
        f32x8 top = all(-kInf);
        for (int i = 0; i < kBlock; i += 8) {
            const f32x8 v = load(p + i);
            nan |= v != v;
            top = max8(v, top);  // the second operand where v is NaN
        }
        row_max = max8(top, row_max);
        block_max[b] = largest(top);
    }
    return {largest(row_max), mask8(nan) != 0};
}

// exp_poly of noise.hpp, eight at a time: the same operations in the same order.
SEER_INLINE f32x8 exp8(f32x8 y) {
    y = max8(y, all(kExpMin));
    const f32x8 shifted = y * kLog2E + kRound;
    const f32x8 n = shifted - kRound;
    f32x8 r = y - n * kLn2Hi;
    r = r - n * kLn2Lo;
    f32x8 p = all(kExpPoly[0]);
    for (size_t i = 1; i < kExpPoly.size(); ++i) p = p * r + kExpPoly[i];
    p = p * (r * r);
    p = p + r;
    p = p + 1.0f;
    const u32x8 bits = (u32x8)shifted - std::bit_cast<uint32_t>(kRound);
    return p * (f32x8)((bits + 127u) << 23);
}

void bounds(const float* block_max, int32_t blocks, float max, float temperature, float* bound) {
    const float inverse = 1.0f / temperature;
    for (int32_t b = 0; b < blocks; b += 8)
        store(bound + b, exp8((load(block_max + b) - max) * inverse));
}

double exp_sum(const Row& row, float temperature, float keep) {
    constexpr int kFlush = 32;  // blocks summed in float32 before the double takes over
    const float inverse = 1.0f / temperature;
    float pad[kBlock];
    double total = 0.0;
    f32x8 sum{};
    int pending = 0;
    const auto flush = [&] {
        for (int lane = 0; lane < 8; ++lane) total += sum[lane];
        sum = f32x8{};
        pending = 0;
    };
    const int32_t blocks = block_count(row.vocab);
    for (int32_t b = 0; b < blocks; ++b) {
        if (row.bound[b] < kNegligible) continue;
        const float* p = block_of(row.x, row.vocab, b, pad);
        for (int i = 0; i < kBlock; i += 8) {
            const f32x8 v = load(p + i);
            const f32x8 term = exp8((v - row.max) * inverse);
            sum += (f32x8)((i32x8)term & (v >= keep));
        }
        if (++pending == kFlush) flush();
    }
    flush();
    return total;
}

void scale(const float* x, int32_t vocab, float temperature, float* out) {
    int32_t i = 0;
    for (; i + 8 <= vocab; i += 8) store(out + i, load(x + i) / temperature);
    for (; i < vocab; ++i) out[i] = x[i] / temperature;
}

// Philox for the eight counters of a block. Words of a block: word[j] lane l is word j of counter
// 8 * block + l / 2 + (l % 2 ? 4 : 0). Counters live in 64-bit lanes of which only the low half counts.
struct BlockWords {
    u32x8 word[4];
};

struct PhiloxKeys {
    uint32_t k0[kPhiloxRounds], k1[kPhiloxRounds];
};

SEER_INLINE PhiloxKeys philox_keys(uint64_t key) {
    PhiloxKeys keys;
    for (uint32_t round = 0; round < kPhiloxRounds; ++round) {
        keys.k0[round] = static_cast<uint32_t>(key) + round * kPhiloxWeyl0;
        keys.k1[round] = static_cast<uint32_t>(key >> 32) + round * kPhiloxWeyl1;
    }
    return keys;
}

SEER_INLINE BlockWords philox_block(int32_t block, uint64_t position, const PhiloxKeys& keys) {
    u64x4 c[2][4];
    for (int half = 0; half < 2; ++half) {
        c[half][0] = u64x4{0, 1, 2, 3} + static_cast<uint64_t>(block * 8 + half * 4);
        c[half][1] = u64x4{} + (position & 0xFFFFFFFFu);
        c[half][2] = u64x4{} + (position >> 32);
        c[half][3] = u64x4{};
    }
#pragma GCC unroll 10
    for (int round = 0; round < kPhiloxRounds; ++round)
        for (auto& h : c) {
            const u64x4 p0 = mul_low32(h[0], kPhiloxMul0), p1 = mul_low32(h[2], kPhiloxMul1);
            h[0] = (p1 >> 32) ^ h[1] ^ uint64_t{keys.k0[round]};
            h[2] = (p0 >> 32) ^ h[3] ^ uint64_t{keys.k1[round]};
            h[1] = p1;
            h[3] = p0;
        }
    BlockWords out;
    for (int j = 0; j < 4; ++j)
        out.word[j] = (u32x8)((c[0][j] & 0xFFFFFFFFu) | (c[1][j] << 32));
    return out;
}

int32_t noise_argmax(const Row& row, const Draw& draw) {
    const PhiloxKeys keys = philox_keys(draw.key);
    const float row_max = row.max / draw.temperature;
    const double slack = 0x1p-10 + 0x1p-21 * std::fabs(row_max);  // rounding of x + noise and of the bounds
    float best = -kInf;
    int32_t best_token = row.vocab;
    float reach = 0.0f;  // bound * reach, in units of 2^-31: the v up to which a block can win
    const auto offer = [&](int32_t token, uint32_t word) {
        const float x = row.x[token] / draw.temperature;
        if (!(x >= draw.keep)) return;
        const float noisy = x + gumbel(word);
        if (noisy > best || (noisy == best && token < best_token)) {
            best = noisy;
            best_token = token;
            reach = static_cast<float>(0x1p31 * std::exp(std::min(double{row_max} - best + slack, 50.0)));
        }
    };
    const int32_t top = first_max(row);
    offer(top, noise_word(draw.key, draw.position, top));

    const int32_t blocks = block_count(row.vocab);
    for (int32_t b = 0; b < blocks; ++b) {
        const float limit = row.bound[b] * reach;
        // exponential >= v >= 2^-33, a quarter of the unit: below that no word can win
        if (limit < 0.249f) continue;
        const auto words = philox_block(b, static_cast<uint64_t>(draw.position), keys);
        const int32_t v_limit = limit < 0x1.fffffep30f ? static_cast<int32_t>(limit) : INT32_MAX;
        const u32x8 low = min8(min8(words.word[0], words.word[1]), min8(words.word[2], words.word[3]));
        if (mask8((i32x8)(low >> 1) <= v_limit) == 0) [[likely]] continue;
        for (int j = 0; j < 4; ++j) {
            for (uint32_t m = mask8((i32x8)(words.word[j] >> 1) <= v_limit); m != 0; m &= m - 1) {
                const int lane = std::countr_zero(m);
                const int32_t token = b * kBlock + 4 * (lane / 2 + lane % 2 * 4) + j;
                if (token < row.vocab) offer(token, words.word[j][lane]);
            }
        }
    }
    return best_token;
}

SEER_INLINE i32x8 bins8(f32x8 v, const Row& row, const Zone& zone) {
    const i32x8 bin = __builtin_convertvector((row.max - v) * zone.bin_scale, i32x8);
    return bin < kBins - 1 ? bin : i32x8{} + (kBins - 1);
}

void histogram(const Row& row, const Zone& zone, int64_t* mass) {
    float pad[kBlock];
    int32_t weight[kBlock], bin[kBlock];
    const int32_t blocks = block_count(row.vocab);
    for (int32_t b = 0; b < blocks; ++b) {
        if (row.block_max[b] < zone.floor) continue;
        const float* p = block_of(row.x, row.vocab, b, pad);
        for (int i = 0; i < kBlock; i += 8) {
            const f32x8 v = load(p + i);
            const i32x8 inside = v >= zone.floor;
            const i32x8 w = __builtin_convertvector(exp8(v - row.max) * kWeightOne, i32x8) & inside;
            const i32x8 slot = bins8(v, row, zone) & inside;
            std::memcpy(weight + i, &w, sizeof w);
            std::memcpy(bin + i, &slot, sizeof slot);
        }
        for (int i = 0; i < kBlock; ++i) mass[bin[i]] += weight[i];
    }
}

int32_t gather(const Row& row, const Zone& zone, float* out) {
    float pad[kBlock];
    int32_t count = 0;
    const int32_t blocks = block_count(row.vocab);
    for (int32_t b = 0; b < blocks; ++b) {
        if (row.block_max[b] < zone.floor) continue;
        const float* p = block_of(row.x, row.vocab, b, pad);
        for (int i = 0; i < kBlock; i += 8) {
            const f32x8 v = load(p + i);
            const i32x8 inside = (v >= zone.floor) & (bins8(v, row, zone) == zone.bin);
            for (uint32_t m = mask8(inside); m != 0; m &= m - 1) out[count++] = p[i + std::countr_zero(m)];
        }
    }
    return count;
}

constexpr Kernels kTable = {scan, bounds, exp_sum, scale, noise_argmax, histogram, gather};

#undef SEER_INLINE
