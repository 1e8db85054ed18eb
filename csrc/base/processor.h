// The processor that is compiled for: the only place that asks. With SYNCENGINE_PORTABLE it is none that is known, so
// that the code for all others is tested too.
#pragma once

#if defined(__x86_64__) && !defined(SYNCENGINE_PORTABLE)
#define SYNCENGINE_X86_64 1
#else
#define SYNCENGINE_X86_64 0
#endif

#if defined(__aarch64__) && !defined(SYNCENGINE_PORTABLE)
#define SYNCENGINE_AARCH64 1
#else
#define SYNCENGINE_AARCH64 0
#endif
