// What the parts of an endpoint share. All of it is touched under the endpoint's progress lock only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "base/texts.h"
#include "transport/interhost.h"

namespace syncengine::matching {

struct Shared {
  int rank = -1;
  RankNames names = {};
  bool checksum = false;                                              // CRC-32C of all data
  bool news = false;                                                  // the engine is to be told
  std::vector<Interhost::Message> heard;                              // on their way to it
  std::string log;                                                    // lines for stderr, once no lock is held
  std::vector<std::byte> scratch = std::vector<std::byte>(64 << 10);  // where bytes go that nobody wants any more
};

inline Error garbage(const RankNames& names, int peer, const std::string& what) {
  return {ErrorKind::PeerLost, names(peer) + " sent " + what +
                                   ": its memory or the network is faulty, or somebody interferes; it was given "
                                   "up (SYNCENGINE_CHECKSUM=1 tells more)"};
}

inline Error size_mismatch(const RankNames& names, int from, uint64_t sent, int to, uint64_t wanted) {
  return {ErrorKind::Mismatch, names(from) + " sends " + std::to_string(sent) + " bytes where " + names(to) +
                                   " expects " + std::to_string(wanted)};
}

}  // namespace syncengine::matching
