#include "sampler/simd_kernels.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "sampler/noise.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace seer {
namespace {

// Vector extensions of GCC and Clang: lowered to whatever registers the instruction set has.
using f32x8 = float __attribute__((vector_size(32)));
using i32x8 = int32_t __attribute__((vector_size(32)));
using u32x8 = uint32_t __attribute__((vector_size(32)));
using u64x4 = uint64_t __attribute__((vector_size(32)));

constexpr float kNegligible = 1e-13f;  // of the row's largest term: 10^6 of them stay below 1e-6

#define SEER_AVX2 0
namespace base {
#include "sampler/simd_kernels.inl"
}
#undef SEER_AVX2
}  // namespace
}  // namespace seer

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SEER_AVX2 1  // g++ does not define __AVX2__ for the pragma
#pragma GCC push_options
#pragma GCC target("avx2")
namespace seer {
namespace {
namespace avx2 {
#include "sampler/simd_kernels.inl"
}
}  // namespace
}  // namespace seer
#pragma GCC pop_options
#endif

namespace seer {

namespace {
struct Choice {
    const Kernels* table;
    const char* name;
};

Choice choose() {
#ifdef SEER_AVX2
    const char* wanted = std::getenv("SEER_INSTRUCTION_SET");  // "base": for tests and bug reports
    const bool base_only = wanted != nullptr && std::string_view(wanted) == "base";
    if (!base_only && __builtin_cpu_supports("avx2")) return {&avx2::kTable, "avx2"};
#endif
    return {&base::kTable, "base"};
}

const Choice kChoice = choose();
}  // namespace

const Kernels& kernels() { return *kChoice.table; }
const char* kernels_name() { return kChoice.name; }

}  // namespace seer
