// Movers of packets whose other end is in Python, and the endpoints on them.
#pragma once

#include <memory>

#include "transport/interhost.h"
#include "transport/packets/packets.h"

namespace syncengine {

// What Python hands to connect(). Used up by it.
struct MoverHandle {
  std::unique_ptr<packets::Mover> mover;
  packets::Options options;
};

// An endpoint that end_movers() knows. `peers` as packets::connect has them.
std::unique_ptr<Interhost> connect_by(MoverHandle& handle, int rank, const std::vector<int>& peers, RankNames names);

}  // namespace syncengine
