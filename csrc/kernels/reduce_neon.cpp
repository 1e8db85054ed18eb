// The kernels for ARM.
#include "base/processor.h"
#include "kernels/isa.h"

#if SYNCENGINE_AARCH64

#include "kernels/neon.h"

namespace syncengine::kernels {

constinit const ReduceFunction kReduceNeon = &reduce<Neon>;

}  // namespace syncengine::kernels

#endif
