// The processor that this is compiled for; only this file tests for it. With SYNCENGINE_PORTABLE it is an unknown one,
// so that the code for all others is tested too.
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
