// The reducer's lane on a CUDA device.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "engine/communicator/communicator.h"
#include "reducer/buckets/bucket_lane.h"

namespace syncengine {

// Throws InvalidUsage that says what is missing where there is no such device. The ranks connect at its first
// allocate().
std::unique_ptr<BucketLane> make_device_lane(const std::shared_ptr<Communicator>& communicator, c10::Device device);

}  // namespace syncengine
