// The portable instruction set: 16-byte vectors that the compiler lowers to whatever every processor of the target has.
#include "kernels/body.h"

namespace syncengine::kernels {
namespace {

struct Scalar : HalfConversions<16>, PartialByCopy {
  SYNCENGINE_INLINE static bool any(Words x, uint32_t bits) { return ((x[0] | x[1] | x[2] | x[3]) & bits) != 0; }
};

}  // namespace

constinit const ReduceFunction kReduceScalar = &reduce<Scalar>;

}  // namespace syncengine::kernels
