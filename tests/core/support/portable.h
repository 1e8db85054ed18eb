// Included first by every file of the flavor tsan: what only x86 has is an error then, though this may be x86.
// A processor's branches belong behind base/processor.h.
// The standard library's own uses come before.
#include <atomic>
#include <stop_token>

#pragma GCC poison __builtin_ia32_pause __builtin_cpu_init __builtin_cpu_supports __builtin_cpu_is
// The guards of the compiler's headers: immintrin.h and x86intrin.h, their SSE parts, ia32intrin.h, cpuid.h.
#pragma GCC poison _IMMINTRIN_H_INCLUDED _X86INTRIN_H_INCLUDED _MMINTRIN_H_INCLUDED _XMMINTRIN_H_INCLUDED
#pragma GCC poison _EMMINTRIN_H_INCLUDED _X86GPRINTRIN_H_INCLUDED _CPUID_H_INCLUDED
