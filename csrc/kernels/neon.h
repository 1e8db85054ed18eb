// ARM's 16-byte vectors. float16 is converted by FCVTL and FCVTN, which every processor of this kind has.
//
// Internal linkage for the reason given in half.h.
#pragma once

#include <arm_neon.h>

#include "kernels/body.h"

namespace syncengine::kernels {
namespace {

struct Neon : HalfConversions<16>, PartialByCopy {
  SYNCENGINE_INLINE static Pair from_float16(Words x) {
    const float16x8_t halves = vreinterpretq_f16_u32((uint32x4_t)x);
    return {(Floats)vcvt_f32_f16(vget_low_f16(halves)), (Floats)vcvt_high_f32_f16(halves)};
  }
  SYNCENGINE_INLINE static Words to_float16(Pair x) {
    const float16x4_t low = vcvt_f16_f32((float32x4_t)x.low);
    return (Words)vreinterpretq_u32_f16(vcvt_high_f16_f32(low, (float32x4_t)x.high));
  }
  SYNCENGINE_INLINE static bool any(Words x, uint32_t bits) { return vmaxvq_u32((uint32x4_t)(x & bits)) != 0; }
};

}  // namespace
}  // namespace syncengine::kernels
