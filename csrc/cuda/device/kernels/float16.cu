#include "cuda/device/kernels/making.h"

template struct syncengine::cuda::KernelsOf<syncengine::kernels::Float16Element>;
