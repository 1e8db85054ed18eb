#include "cuda/device/kernels/making.h"

template struct syncengine::cuda::KernelsOf<syncengine::kernels::PlainElement<int64_t>>;
