// The buckets of a model, checked: pure functions on indices.
#pragma once

#include <memory>
#include <vector>

#include "reducer/bucket.h"
#include "reducer/gradient.h"

namespace syncengine {

// One empty bucket for each list of parameter indices. Throws Error(InvalidUsage) if an index is out of range or occurs
// twice, or if a bucket is empty or of several dtypes.
std::vector<Bucket> make_buckets(const std::vector<std::vector<size_t>>& indices,
                                 const std::vector<Gradient>& gradients,
                                 const std::shared_ptr<const ModelNames>& names);

}  // namespace syncengine
