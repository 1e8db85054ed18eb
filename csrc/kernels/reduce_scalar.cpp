// The portable instruction set: 16-byte vectors that the compiler lowers to whatever every processor of the target has.
#include "kernels/body.h"

namespace syncengine::kernels {
namespace {

struct Scalar : HalfConversions<16>, PartialByCopy {
  static constexpr size_t kVectorBytes = 16;
};

}  // namespace

constinit const ReduceFunction kReduceScalar = &reduce<Scalar>;

}  // namespace syncengine::kernels
