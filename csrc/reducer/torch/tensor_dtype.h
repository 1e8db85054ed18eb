// torch's dtypes as ours.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

#include "base/dtype.h"

namespace syncengine {

// A complex number counts as two real ones; nothing for dtypes that no gradient of ours can have.
inline std::optional<DType> gradient_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
    case c10::ScalarType::ComplexHalf: return DType::Float16;
    case c10::ScalarType::BFloat16: return DType::BFloat16;
    case c10::ScalarType::Float:
    case c10::ScalarType::ComplexFloat: return DType::Float32;
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble: return DType::Float64;
    default: return std::nullopt;
  }
}

}  // namespace syncengine
