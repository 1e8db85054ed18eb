#include "engine/hosts/in_flight_chunk.h"

#include <algorithm>

#include "base/alignment.h"

namespace syncengine::hosts {

namespace {

constexpr size_t kBlockBytes = 256 << 10;

}  // namespace

std::byte* Scratch::take(size_t bytes) {
  bytes = round_up(bytes, kCacheLine);
  while (block_ < blocks_.size() && blocks_[block_].bytes - used_ < bytes) {
    ++block_;
    used_ = 0;
  }
  if (block_ == blocks_.size()) {
    size_t size = std::max(bytes, kBlockBytes);
    blocks_.push_back({std::make_unique_for_overwrite<std::byte[]>(size), size});
  }
  std::byte* piece = blocks_[block_].memory.get() + used_;
  used_ += bytes;
  return piece;
}

void Scratch::clear() { block_ = used_ = 0; }

bool InFlightChunk::arrived() const {
  return std::all_of(progress.begin(), progress.end(), [](const Progress& cell) { return cell.arrived; });
}

bool InFlightChunk::quiet() const {
  for (size_t i = 0; i < cells.size(); ++i)
    if (progress[i].step < cells[i].steps.size()) return false;
  return true;
}

}  // namespace syncengine::hosts
