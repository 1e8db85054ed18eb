#include "cuda/device/kernels/making.h"

template struct syncengine::cuda::KernelsOf<syncengine::kernels::PlainElement<int8_t>>;
template struct syncengine::cuda::KernelsOf<syncengine::kernels::PlainElement<int16_t>>;
template struct syncengine::cuda::KernelsOf<syncengine::kernels::PlainElement<int32_t>>;
template struct syncengine::cuda::KernelsOf<syncengine::kernels::PlainElement<int64_t>>;
template struct syncengine::cuda::KernelsOf<syncengine::kernels::PlainElement<uint8_t>>;
