// Checks that all ranks mean the same operation. Fingerprints are always compared before any byte is used.
#pragma once

#include <string>

#include "base/checked.h"
#include "collectives/operation.h"
#include "transport/shm/layout.h"

namespace syncengine {

// A text such as "all_reduce(sum, float32, 1000 elements)", or the operation's own description if it has one.
std::string describe(const Operation& operation);

// The record of this rank's operation, which its peers compare with theirs.
shm::OpRecord record_of(const Operation& operation, uint64_t key, int64_t spans);

// A copy of a record whose enumerators have been checked. Throws PeerLost, naming the rank that has written the record.
Checked<shm::OpRecord> check(const shm::OpRecord& copy, int rank);

// Throws Mismatch, naming both sides by their ranks in the job, unless the peer's record agrees with this rank's record
// of `operation`. Called for every operation, once for each peer.
void require_same(int me, const Checked<shm::OpRecord>& mine, int peer, const Checked<shm::OpRecord>& theirs,
                  const Operation& operation);

}  // namespace syncengine
