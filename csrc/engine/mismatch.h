// Do all ranks mean the same operation? Fingerprints compared before a byte is used, always.
#pragma once

#include <string>

#include "collectives/operation.h"
#include "engine/group.h"

namespace syncengine {

// "all_reduce(sum, float32, 1000 elements)", or the operation's own words.
std::string describe(const Operation& operation);

// Throws Mismatch, naming both sides, unless `member`'s record agrees with the own one of `operation`.
void require_same(const Group& group, const shm::OpRecord& mine, int member, const shm::OpRecord& theirs,
                  const Operation& operation);

}  // namespace syncengine
