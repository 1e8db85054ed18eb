#include "collectives/plan.h"

#include "base/memory.h"

namespace syncengine {

namespace {

void plan_one_shot(const Chunk& chunk, ChunkPlan& plan) {
  plan.stage.push_back({chunk.begin, 0, chunk.length});
  plan.reduces = true;
  plan.reduce = {
      .slot = 0, .input = chunk.begin, .output = chunk.begin, .bytes = chunk.length, .own_from_slot = chunk.stage_all};
}

// Plans a staged all-reduce. Step 0: stage what others reduce. Step 1: reduce the own slice, from the own tensor and
// the peers' slots, into both. Step 2: pull the other slices out of the own slot.
//
// Nothing leaves the cache. The owner pushes its result, since a core writes a line that it has just read three times
// faster than it reads a line of its own that a peer has read meanwhile.
void plan_staged_all_reduce(const Chunk& chunk, ChunkPlan& plan) {
  auto [own_begin, own_end] = slice(chunk.length, chunk.world, chunk.rank);
  if (chunk.stage_all) {
    plan.stage.push_back({chunk.begin, 0, chunk.length});
  } else {
    if (own_begin > 0) plan.stage.push_back({chunk.begin, 0, own_begin});
    if (own_end < chunk.length) plan.stage.push_back({chunk.begin + own_end, own_end, chunk.length - own_end});
  }
  plan.reduces = plan.pulls = true;
  plan.reduce = {.slot = own_begin,
                 .input = chunk.begin + own_begin,
                 .output = chunk.begin + own_begin,
                 .bytes = own_end - own_begin,
                 .own_from_slot = chunk.stage_all,
                 .into_peers = true};
  if (own_begin > 0) plan.pull.push_back({chunk.rank, 0, chunk.begin, own_begin});
  if (own_end < chunk.length) plan.pull.push_back({chunk.rank, own_end, chunk.begin + own_end, chunk.length - own_end});
}

// Plans a direct all-reduce: the owner reads its slice of all tensors and writes the result into all of them, two
// passes over memory in all.
void plan_direct_all_reduce(const Chunk& chunk, ChunkPlan& plan) {
  auto [begin, end] = slice(chunk.length, chunk.world, chunk.rank);
  plan.reduces = plan.pulls = true;  // pulls nothing, but waits until the peers have written their slices here
  plan.reduce = {.slot = chunk.begin + begin,
                 .input = chunk.begin + begin,
                 .output = chunk.begin + begin,
                 .bytes = end - begin,
                 .into_peers = true};
}

// Changes an all-reduce's plan. Step 1: reduce as above, but leave the result with the owner. Step 2: pull each peer's
// slice from where its owner left it.
void pull_instead_of_push(const Chunk& chunk, ChunkPlan& plan) {
  bool direct = chunk.path == Path::Direct;
  plan.reduce.into_peers = false;
  plan.reduce.into_own_slot = !direct;
  plan.pull.clear();
  for (int peer = 0; peer < chunk.world; ++peer) {
    auto [begin, end] = slice(chunk.length, chunk.world, peer);
    if (peer == chunk.rank || begin == end) continue;
    plan.pull.push_back({peer, direct ? chunk.begin + begin : begin, chunk.begin + begin, end - begin});
  }
  plan.peers_read_user = direct;
}

void plan_reduce_scatter(const Chunk& chunk, ChunkPlan& plan) {
  bool direct = chunk.path == Path::Direct;
  for (int peer = 0; peer < chunk.world && !direct; ++peer) {
    if (peer != chunk.rank || chunk.stage_all)
      plan.stage.push_back({peer * chunk.block + chunk.begin, peer * chunk.length, chunk.length});
  }
  size_t own = chunk.rank * chunk.block + chunk.begin;
  plan.reduces = true;
  plan.reduce = {.slot = direct ? own : chunk.rank * chunk.length,
                 .input = own,
                 .output = chunk.begin,
                 .bytes = chunk.length,
                 .own_from_slot = chunk.stage_all};
  plan.peers_read_user = direct;
}

void plan_all_gather(const Chunk& chunk, ChunkPlan& plan) {
  bool direct = chunk.path == Path::Direct;
  if (!direct) plan.stage.push_back({chunk.begin, 0, chunk.length});
  plan.pulls = true;
  for (int peer = 0; peer < chunk.world; ++peer)
    plan.pull.push_back({peer, direct ? chunk.begin : 0, peer * chunk.block + chunk.begin, chunk.length});
  plan.peers_read_user = direct;
}

void plan_broadcast(const Chunk& chunk, ChunkPlan& plan) {
  bool direct = chunk.path == Path::Direct;
  if (chunk.rank == chunk.root) {
    if (!direct) plan.stage.push_back({chunk.begin, 0, chunk.length});
  } else {
    plan.pulls = true;
    plan.pull.push_back({chunk.root, direct ? chunk.begin : 0, chunk.begin, chunk.length});
  }
  plan.peers_read_user = direct && chunk.rank == chunk.root;
}

}  // namespace

size_t block_bytes(const Operation& operation) {
  return operation.collective == Collective::AllGather ? operation.input.bytes() : operation.output.bytes();
}

size_t chunk_bytes(Collective collective, Path path, int world, size_t slot_bytes, size_t direct_bytes) {
  if (path == Path::Direct) return direct_bytes * (collective == Collective::AllReduce ? world : 1);
  if (collective != Collective::ReduceScatter) return slot_bytes;
  return slot_bytes / world / kCacheLine * kCacheLine;  // a slot holds one part for each rank
}

std::pair<size_t, size_t> slice(size_t length, int world, int rank) {
  size_t share = round_up((length + world - 1) / world, kCacheLine);
  return {std::min(length, share * rank), std::min(length, share * (rank + 1))};
}

void plan_chunk(const Chunk& chunk, ChunkPlan& plan) {
  plan.stage.clear();
  plan.pull.clear();
  plan.reduce = {};
  plan.reduces = plan.pulls = plan.peers_read_user = false;
  switch (chunk.collective) {
    case Collective::AllReduce:
      if (chunk.path == Path::OneShot) return plan_one_shot(chunk, plan);
      chunk.path == Path::Direct ? plan_direct_all_reduce(chunk, plan) : plan_staged_all_reduce(chunk, plan);
      if (chunk.pull_results) pull_instead_of_push(chunk, plan);
      return;
    case Collective::ReduceScatter: return plan_reduce_scatter(chunk, plan);
    case Collective::AllGather: return plan_all_gather(chunk, plan);
    case Collective::Broadcast: return plan_broadcast(chunk, plan);
    case Collective::Barrier: plan.pulls = true; return;
  }
}

}  // namespace syncengine
