// ARM with FEAT_BF16: bfloat16 by BFCVTN, which rounds as half.h does and keeps subnormals and NaN.
#include "base/processor.h"
#include "kernels/isa.h"

#if SYNCENGINE_AARCH64

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("bf16"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+bf16")
#endif

#include "kernels/neon.h"

namespace syncengine::kernels {
namespace {

struct NeonBf16 : Neon {
  struct BFloat16Conversions {
    SYNCENGINE_INLINE static Pair from_bfloat16(Words x) {
      const uint16x8_t halves = vreinterpretq_u16_u32((uint32x4_t)x);
      return {(Floats)vshll_n_u16(vget_low_u16(halves), 16), (Floats)vshll_high_n_u16(halves, 16)};
    }
    SYNCENGINE_INLINE static Words to_bfloat16(Pair x) {
      const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)x.low);
      return (Words)vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(low, (float32x4_t)x.high));
    }
    SYNCENGINE_INLINE static Words finite_to_bfloat16(Pair x) { return to_bfloat16(x); }
  };
};

}  // namespace

constinit const ReduceFunction kReduceNeonBf16 = &reduce<NeonBf16>;

}  // namespace syncengine::kernels

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif
