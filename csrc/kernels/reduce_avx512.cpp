// AVX-512 (F, BW, DQ, VL): 64-byte vectors, float16 by its own conversions.
#include "base/processor.h"
#include "kernels/isa.h"

#if SYNCENGINE_X86_64

#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // g++ 12 warns of an unused register in its own header
#endif
#include <immintrin.h>

// The instruction set is enabled from here on, so that the build needs no flags, and the headers above stay generic.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "kernels/body.h"

namespace syncengine::kernels {
namespace {

struct Avx512 : HalfConversions<64> {
  SYNCENGINE_INLINE static Pair from_float16(Words x) {
    const auto bits = (__m512i)x;
    return {_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
  }
  SYNCENGINE_INLINE static Words to_float16(Pair x) {
    const __m256i low = _mm512_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT);
    const __m256i high = _mm512_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT);
    return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }

  SYNCENGINE_INLINE static bool any(Words x, uint32_t bits) {
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)(Words{} + bits)) != 0;
  }
  SYNCENGINE_INLINE static bool any_nonfinite(Floats x) { return _mm512_fpclass_ps_mask(x, 0x99) != 0; }
  SYNCENGINE_INLINE static bool any_nonfinite(Vector<double, kVectorBytes> x) {
    return _mm512_fpclass_pd_mask(x, 0x99) != 0;
  }

  template <class V>
  SYNCENGINE_INLINE static V load_partial(const std::byte* source, size_t bytes) {
    return (V)_mm512_maskz_loadu_epi8(first(bytes), source);
  }
  template <class V>
  SYNCENGINE_INLINE static void store_partial(std::byte* destination, V value, size_t bytes) {
    _mm512_mask_storeu_epi8(destination, first(bytes), (__m512i)value);
  }

 private:
  SYNCENGINE_INLINE static __mmask64 first(size_t bytes) { return (__mmask64{1} << bytes) - 1; }  // of fewer than 64
};

}  // namespace

constinit const ReduceFunction kReduceAvx512 = &reduce<Avx512>;

}  // namespace syncengine::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
