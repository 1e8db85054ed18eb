// Default floating-point state for a scope: to nearest, subnormals kept, no traps. Restores the thread's own state.
//
// The compiler does not know that arithmetic depends on this state, so the arithmetic must stand in a function that is
// not inlined into the scope.
#pragma once

#include <cfenv>
#include <cstdint>

#include "base/processor.h"
#if SYNCENGINE_X86_64
#include <xmmintrin.h>
#endif

namespace syncengine::kernels {

#if SYNCENGINE_X86_64
using FpState = uint32_t;
inline FpState read_fp_state() { return _mm_getcsr() & ~0x3fu; }  // without the sticky exception flags
inline void write_fp_state(FpState state) { _mm_setcsr(state); }
inline constexpr FpState kDefaultFpState = 0x1f80;
#elif SYNCENGINE_AARCH64
using FpState = uint64_t;
inline FpState read_fp_state() {
  FpState state;
  asm volatile("mrs %0, fpcr" : "=r"(state));
  return state;
}
inline void write_fp_state(FpState state) { asm volatile("msr fpcr, %0" : : "r"(state) : "memory"); }
inline constexpr FpState kDefaultFpState = 0;
#else
using FpState = int;
inline FpState read_fp_state() { return std::fegetround(); }
inline void write_fp_state(FpState state) { std::fesetround(state); }
inline constexpr FpState kDefaultFpState = FE_TONEAREST;
#endif

class DefaultFpState {
 public:
  DefaultFpState() : saved_(read_fp_state()) {
    if (saved_ != kDefaultFpState) write_fp_state(kDefaultFpState);
  }
  ~DefaultFpState() {
    if (saved_ != kDefaultFpState) write_fp_state(saved_);
  }
  DefaultFpState(const DefaultFpState&) = delete;
  DefaultFpState& operator=(const DefaultFpState&) = delete;

 private:
  FpState saved_;
};

}  // namespace syncengine::kernels
