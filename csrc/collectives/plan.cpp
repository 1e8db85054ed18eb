#include "collectives/plan.h"

#include "base/memory.h"

namespace syncengine {

namespace {

void plan_one_shot(const Chunk& chunk, ChunkPlan& plan) {
  plan.stage.push_back({chunk.begin, 0, chunk.length});
  plan.reduces = true;
  plan.reduce = {.input = chunk.begin, .output = chunk.begin, .bytes = chunk.length, .own_from_slot = chunk.stage_all};
}

// Plans an all-reduce. Step 0: stage what others reduce. Step 1: reduce the own slice, from the own tensor and the
// peers' slots, into both. Step 2: pull the other slices out of the own slot. On the direct path tensors serve as
// slots: nothing is staged or pulled, so each byte of a tensor is read once and written once.
//
// Slots stay in the cache. The owner of a slice pushes the result into the peers' slots: a core is three times faster
// at writing a line that it has just read than at reading a line of its own that a peer has read meanwhile.
void plan_all_reduce(const Chunk& chunk, ChunkPlan& plan) {
  const bool direct = chunk.path == Path::Direct;
  auto [begin, end] = slice(chunk.length, chunk.world, chunk.rank);
  plan.reduces = plan.pulls = true;  // direct: pulls nothing, but waits until the peers have written their slices here
  plan.reduce = {.slot = direct ? chunk.begin + begin : begin,
                 .input = chunk.begin + begin,
                 .output = chunk.begin + begin,
                 .bytes = end - begin,
                 .own_from_slot = chunk.stage_all,
                 .into_peers = true};
  if (direct) return;
  if (chunk.stage_all) plan.stage.push_back({chunk.begin, 0, chunk.length});
  for (auto [first, past] : {std::pair{size_t{0}, begin}, std::pair{end, chunk.length}}) {
    if (first == past) continue;
    if (!chunk.stage_all) plan.stage.push_back({chunk.begin + first, first, past - first});
    plan.pull.push_back({chunk.rank, first, chunk.begin + first, past - first});
  }
}

// Changes the plan of an all-reduce so that results are pulled. Step 1: reduce, but leave the result with the owner of
// the slice. Step 2: pull each peer's slice from where its owner left it.
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
  plan.pulls = chunk.rank != chunk.root;
  if (plan.pulls)
    plan.pull.push_back({chunk.root, direct ? chunk.begin : 0, chunk.begin, chunk.length});
  else if (!direct)
    plan.stage.push_back({chunk.begin, 0, chunk.length});
  plan.peers_read_user = direct && !plan.pulls;
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
      plan_all_reduce(chunk, plan);
      if (chunk.pull_results) pull_instead_of_push(chunk, plan);
      return;
    case Collective::ReduceScatter: return plan_reduce_scatter(chunk, plan);
    case Collective::AllGather: return plan_all_gather(chunk, plan);
    case Collective::Broadcast: return plan_broadcast(chunk, plan);
    case Collective::Barrier: plan.pulls = true; return;
  }
}

}  // namespace syncengine
