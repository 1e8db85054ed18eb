// The processor that this code is compiled for; only this file tests for it. SYNCENGINE_PORTABLE makes it an unknown
// processor, so that the generic code is tested too.
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
