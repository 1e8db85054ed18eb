// AVX2: 32-byte vectors, float16 by F16C.
#include "base/processor.h"
#include "kernels/isa.h"

#if SYNCENGINE_X86_64

#include <immintrin.h>

// The instruction set is enabled from here on, so that the build needs no flags, and the headers above stay generic.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#include "kernels/body.h"

namespace syncengine::kernels {
namespace {

struct Avx2 : HalfConversions<32>, PartialByCopy {
  SYNCENGINE_INLINE static Pair from_float16(Words x) {
    const auto bits = (__m256i)x;
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(bits)), _mm256_cvtph_ps(_mm256_extracti128_si256(bits, 1))};
  }
  SYNCENGINE_INLINE static Words to_float16(Pair x) {
    const __m128i low = _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT);
    const __m128i high = _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT);
    return (Words)_mm256_set_m128i(high, low);
  }
  SYNCENGINE_INLINE static bool any(Words x, uint32_t bits) {
    return _mm256_testz_si256((__m256i)x, (__m256i)(Words{} + bits)) == 0;
  }
};

}  // namespace

constinit const ReduceFunction kReduceAvx2 = &reduce<Avx2>;

}  // namespace syncengine::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
