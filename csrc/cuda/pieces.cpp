#include "cuda/pieces.h"

#include <algorithm>

#include "base/alignment.h"
#include "collectives/order.h"

namespace syncengine::cuda {

namespace {

constexpr size_t kGrain = 64;           // a multiple of two elements of any dtype: what a ring's cut is rounded to
constexpr size_t kRingSlice = 2 << 20;  // up to that, the ring of `world` slices is cut into exactly these

Piece all_reduce(size_t begin, size_t bytes) {
  const std::vector<Copy> copies{{begin, 0, bytes}};
  return {.in = copies, .out = copies, .input_bytes = bytes, .output_bytes = bytes};
}

Piece broadcast(size_t begin, size_t bytes, bool is_root) {
  Piece piece = all_reduce(begin, bytes);
  (is_root ? piece.out : piece.in).clear();
  return piece;
}

// [begin, begin + bytes) of every rank's block.
Piece reduce_scatter(size_t block, size_t begin, size_t bytes, size_t world) {
  Piece piece{.out = {{begin, world * bytes, bytes}}};
  for (size_t rank = 0; rank < world; ++rank) piece.in.push_back({rank * block + begin, rank * bytes, bytes});
  piece.input_bytes = piece.output = world * bytes;
  piece.output_bytes = bytes;
  return piece;
}

Piece all_gather(size_t block, size_t begin, size_t bytes, size_t world) {
  Piece piece{.in = {{begin, 0, bytes}}};
  for (size_t rank = 0; rank < world; ++rank) piece.out.push_back({rank * block + begin, (rank + 1) * bytes, bytes});
  piece.input_bytes = piece.output = bytes;
  piece.output_bytes = world * bytes;
  return piece;
}

// The same part of each of the ring's slices, next to each other: as a ring of its own it is summed in the same orders.
// Where a slice has ended, the piece holds whatever was there.
Piece ring_part(size_t total, size_t slice, size_t begin, size_t bytes, size_t world) {
  Piece piece{.input_bytes = world * bytes, .output_bytes = world * bytes};
  for (size_t rank = 0; rank < world; ++rank) {
    const size_t from = rank * slice + begin, end = std::min({total, (rank + 1) * slice, from + bytes});
    if (from < end) piece.in.push_back({from, rank * bytes, end - from});
  }
  piece.out = piece.in;
  return piece;
}

}  // namespace

std::vector<Piece> cut(const Operation& operation, int rank, int world, size_t slot_bytes) {
  const auto ranks = static_cast<size_t>(world);
  const bool whole_blocks =
      operation.collective == Collective::AllReduce || operation.collective == Collective::Broadcast;
  size_t block = operation.collective == Collective::Barrier ? 0 : block_bytes(operation);
  size_t most = round_down(whole_blocks ? slot_bytes : slot_bytes / (ranks + 1), kGrain);
  const bool ring =
      operation.collective == Collective::AllReduce && operation.numerics == Numerics::Ring && block > most;
  if (ring) {
    block = ring_cut(operation.input.bytes(), element_size(operation.dtype), world).chunk;
    most = std::min(round_down(slot_bytes / ranks, kGrain), kRingSlice);
  }
  std::vector<Piece> pieces;
  size_t begin = 0;
  do {
    const size_t bytes = std::min(most, block - begin);
    if (ring)
      pieces.push_back(ring_part(operation.input.bytes(), block, begin, round_up(bytes, kGrain), ranks));
    else if (operation.collective == Collective::ReduceScatter)
      pieces.push_back(reduce_scatter(block, begin, bytes, ranks));
    else if (operation.collective == Collective::AllGather)
      pieces.push_back(all_gather(block, begin, bytes, ranks));
    else if (operation.collective == Collective::Broadcast)
      pieces.push_back(broadcast(begin, bytes, rank == operation.root));
    else
      pieces.push_back(all_reduce(begin, bytes));
    begin += bytes;
  } while (begin < block);
  return pieces;
}

}  // namespace syncengine::cuda
