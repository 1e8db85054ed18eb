// Which way a collective takes between hosts: the one that the links' measured speed makes quicker. No bits depend on
// it.
//
// Ownership: plain data, pure functions: the same on all ranks that were given the same. Failure: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "collectives/operation.h"
#include "collectives/placement.h"

namespace syncengine {

// How contributions from several hosts become one sum. The first two give the same bits.
enum class Way : uint8_t {
  Exchange,  // a cell has a home, whose handler gets every rank's own bytes, adds them in order, and returns the result
  Chain,     // the running sum goes from host to host, in the order of ranks; the result comes back the same way
  Sums,      // as Exchange, but of each host's sum (numerics "fast")
};

enum class HostAlgorithm : uint8_t {
  Auto,      // whichever takes less time
  Exchange,  // never from host to host: fewest hops
  Chain,     // from host to host wherever that is possible, at any size
};

// Between two hosts, while all of them send and receive.
struct LinkSpeed {
  double latency = 30e-6;  // seconds until a short message is there
  double bandwidth = 1e9;  // bytes a second, each way
  double overhead = 5e-6;  // seconds that one more transfer takes the rank that sends it
};

// The sizes in bytes from which on something is done, and `cell`.
struct InterhostChoice {
  static constexpr size_t kNever = ~size_t{0};
  static constexpr size_t kMostCell = 256 << 10, kLeastCell = 32 << 10;
  size_t chain = kNever;       // all-reduce in rank order takes Chain
  size_t chain_half = kNever;  // the same for 16-bit floats, whose running sum is in float32
  size_t relay = kNever;       // broadcast goes from host to host, not from the root's to all
  size_t cell = kMostCell;     // of an all-reduce by Exchange or Sums between ranks that are alone on their hosts
};

// `chunk_bytes` of an all-reduce that takes many of them.
InterhostChoice choose_interhost(const Placement& placement, HostAlgorithm algorithm, const LinkSpeed& speed,
                                 size_t chunk_bytes);
// Whether Auto's choice depends on the speed.
bool speed_matters(const Placement& placement);

Way choose_way(const InterhostChoice& choice, const Operation& operation);
bool relays(const InterhostChoice& choice, const Operation& operation);

std::string describe(const InterhostChoice& choice);
std::string describe(const LinkSpeed& speed);

}  // namespace syncengine
