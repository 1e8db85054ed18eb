#include "engine/hosts/interhost_exchange.h"

#include <algorithm>

#include "base/error.h"
#include "base/memory.h"
#include "base/sync_point.h"
#include "base/trace.h"
#include "engine/lanes/mismatch.h"
#include "kernels/reduce.h"

namespace syncengine::hosts {

namespace {

constexpr size_t kBlockBytes = 256 << 10;  // of Scratch

// The number and size of staging slots between hosts: more and smaller ones than within a host, since a hop takes long.
// They are the same on all hosts, since all must cut a chunk into the same cells, whatever its path within a host.
constexpr size_t kInterhostSlots = 8;
constexpr size_t kInterhostSlotBytes = 128 << 10;
static_assert(kInterhostSlots * kInterhostSlotBytes == shm::kSlots * shm::kSlotBytes);
// Cell sizes for placements in which each rank is alone on its host, so that no rank needs staging slots.
constexpr size_t kCellBytes = 256 << 10, kLeastCellBytes = 32 << 10;
constexpr int kCellsInTurn = 512;
constexpr size_t kScratchBytes = 2 << 20;  // of a chunk of reduce-scatter

size_t whole_lines(size_t bytes) { return std::max(kCacheLine, bytes / kCacheLine * kCacheLine); }

size_t chunk_bytes_alone(Collective collective, const Placement& placement) {
  size_t size = static_cast<size_t>(placement.size);
  switch (collective) {
    case Collective::AllReduce: return std::min(Interhost::kMaxTransfer, kCellBytes * size);
    case Collective::ReduceScatter: return whole_lines(std::min(kCellBytes, kScratchBytes / size));
    default: return kCellBytes;
  }
}

// Bytes of a cell of an all-reduce by Way::Exchange or Way::Sums. Small cells keep few bytes under way, so with more
// than two hosts no peer gets far ahead of the others: the links stay full until the end, and the peers together do not
// overrun one link's queue. For a large tensor the first cell matters little, and larger cells take less CPU time.
size_t cell_bytes(size_t bytes, size_t hosts) {
  size_t cell = kCellBytes;
  while (hosts > 2 && cell > kLeastCellBytes && cell * hosts * kCellsInTurn > bytes) cell /= 2;
  return cell;
}

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

bool InFlightChunk::arrived() const {
  return std::all_of(progress.begin(), progress.end(), [](const Progress& cell) { return cell.arrived; });
}

bool InFlightChunk::quiet() const {
  for (size_t i = 0; i < cells.size(); ++i)
    if (progress[i].step < cells[i].steps.size()) return false;
  return true;
}

InterhostExchange::InterhostExchange(const Links& links, LaneState& lane, Algorithm algorithm)
    : links_(links), lane_(lane), algorithm_(algorithm), runner_(links.placement), agreement_(links, lane) {
  lane.slots = kInterhostSlots;
  lane.slot_bytes = kInterhostSlotBytes;
  lane.always_slots = true;
}

size_t InterhostExchange::all_reduce_chunk(const Placement& placement) {
  return placement.stripes == 1 ? chunk_bytes_alone(Collective::AllReduce, placement) : kInterhostSlotBytes;
}

Path InterhostExchange::wanted_path(const Active& active) const {
  const Operation& asked = active.item.operation;
  if (lane_.group.size == 1) return asked.prescale == 1.0 ? Path::Direct : Path::Staged;
  bool direct = active.in_arena && asked.collective != Collective::AllGather && algorithm_ != Algorithm::Staged &&
                algorithm_ != Algorithm::OneShot;
  return direct ? Path::Direct : Path::Staged;
}

size_t InterhostExchange::chunk_bytes(const Active& active) const {
  const Operation& asked = active.item.operation;
  const Placement& placement = links_.placement;
  if (placement.stripes == 1 && asked.prescale == 1.0) {
    if (is_wide(asked)) return Interhost::kMaxTransfer / 2;  // a running sum takes twice as many bytes
    bool in_cells = asked.collective == Collective::AllReduce && way_of(asked) != Way::Chain;
    size_t most = chunk_bytes_alone(asked.collective, placement);
    const auto size = static_cast<size_t>(placement.size);
    return in_cells ? std::min(most, cell_bytes(asked.input.bytes(), size) * size) : most;
  }
  bool in_parts = asked.collective == Collective::ReduceScatter || asked.collective == Collective::AllGather;
  return in_parts ? whole_lines(lane_.slot_bytes / placement.size) : lane_.slot_bytes;
}

void InterhostExchange::plan(const Chunk& chunk, ChunkPlan& plan) const {
  Chunk global = chunk;
  global.rank = links_.placement.rank;
  global.world = links_.placement.size;
  plan_inside(links_.placement, global, plan);
}

bool InterhostExchange::advance() {
  while (!in_flight_.empty() && in_flight_.front()->total < lane_.pulled.total) {
    landed_.push_back(std::move(in_flight_.front()));
    in_flight_.pop_front();
  }
  start_chunks();
  bool moved = false;
  for (auto& chunk : in_flight_)
    for (size_t cell = 0; cell < chunk->cells.size(); ++cell) moved |= advance(*chunk, cell);
  return moved;
}

bool InterhostExchange::has_arrived(uint64_t chunk) const {
  return chunk < started_.total && in_flight_[chunk - in_flight_.front()->total]->arrived();
}

bool InterhostExchange::uses_own_memory(uint64_t chunk) const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [&](const auto& entry) { return entry->total == chunk && !entry->quiet(); });
}

uint64_t InterhostExchange::remote_blocking_ranks() const {
  if (lane_.active.empty()) return 0;
  uint64_t members = agreement_.missing(lane_.retired);
  if (members) return members;
  for (const auto& chunk : in_flight_) {
    for (size_t i = 0; i < chunk->cells.size(); ++i) {
      const auto& progress = chunk->progress[i];
      bool is_posted = progress.acted || progress.step < progress.receives.size();
      if (progress.step == chunk->cells[i].steps.size() || !is_posted) continue;
      const InterhostStep& step = chunk->cells[i].steps[progress.step];
      const auto& envelopes = progress.acted ? step.sends : step.receives;
      const auto& transfers = progress.acted ? progress.sends : progress.receives[progress.step].transfers;
      for (size_t k = 0; k < envelopes.size(); ++k)
        if (!transfers[k]->ended()) members |= uint64_t{1} << envelopes[k].peer;
    }
    if (members) break;
  }
  return members;
}

void InterhostExchange::start_chunks() {
  while (started_.total < lane_.staged.total) {
    const Active& active = lane_.at(started_.operation);
    const Operation& operation = active.item.operation;
    if (landed_.empty()) landed_.push_back(std::make_unique<InFlightChunk>());
    auto chunk = std::move(landed_.back());
    landed_.pop_back();
    chunk->operation = started_.operation;
    chunk->total = started_.total;
    size_t block = block_bytes(operation), begin = started_.chunk * active.chunk_bytes;
    plan_interhost(links_.placement,
                   {.collective = operation.collective,
                    .way = way_of(operation),
                    .root = operation.root,
                    .block = block,
                    .begin = begin,
                    .length = std::min(block - begin, active.chunk_bytes),
                    .relay = links_.choice.relays(operation)},
                   chunk->cells);
    chunk->progress.assign(chunk->cells.size(), {});
    chunk->scratch.clear();
    in_flight_.push_back(std::move(chunk));
    started_.advance(active);
  }
}

bool InterhostExchange::advance(InFlightChunk& chunk, size_t cell) {
  InFlightChunk::Progress& progress = chunk.progress[cell];
  const auto& steps = chunk.cells[cell].steps;
  bool moved = false;
  // All receives are posted at once (interhost_plan.h says why that is possible). If they were posted later, the peer
  // would hear of them only behind data, which takes milliseconds on a slow link.
  for (; progress.receives.size() < steps.size(); moved = true) {
    const InterhostStep& step = steps[progress.receives.size()];
    if (!may_move(chunk, cell, step.receives, false)) break;
    post_receives(chunk, cell, step);
  }
  for (; progress.step < steps.size(); moved = true) {
    const InterhostStep& step = steps[progress.step];
    if (progress.acted) {
      if (!all_ended(chunk, progress.sends)) return moved;
      if (progress.posted != 0) trace_transfers(chunk, cell, step.sends, progress.posted, "send");
      ++progress.step;
      progress.acted = false;
      continue;
    }
    bool is_posted = progress.step < progress.receives.size();
    if (!is_posted || !all_ended(chunk, progress.receives[progress.step].transfers)) return moved;
    if (!may_move(chunk, cell, step.sends, true)) return moved;
    if (auto posted = std::exchange(progress.receives[progress.step].posted, 0))
      trace_transfers(chunk, cell, step.receives, posted, "receive");
    if (step.staged) {
      if (lane_.behind(&shm::LaneProgress::staged, chunk.total + 1, false)) return moved;
      compare(chunk.operation, lane_.at(chunk.operation));
    }
    act(chunk, cell, step);
    post_sends(chunk, cell, step);
    progress.acted = true;
    progress.arrived = progress.step + 1 == steps.size();
  }
  return moved;
}

bool InterhostExchange::all_ended(const InFlightChunk& chunk, const InFlightChunk::Transfers& transfers) const {
  for (const auto& transfer : transfers) {
    if (!transfer->ended()) return false;
    if (transfer->state() == Interhost::Transfer::State::Failed)
      throw Error(transfer->error().kind(),
                  transfer->error().what() + links_.while_in(describe(lane_.at(chunk.operation).item.operation)));
  }
  return true;
}

// Whether these sends, or receives, may be posted. No byte is used before both ranks are known to mean the same
// operation. Small data is sent at once, but its receive is posted only when that is known. A receive of larger data is
// posted at once, but its send only when that is known: the send waits for the receive anyway, and the receiver has
// told of its operation before, so nobody waits longer.
bool InterhostExchange::may_move(const InFlightChunk& chunk, size_t cell, const std::vector<Envelope>& envelopes,
                                 bool sends) {
  return std::all_of(envelopes.begin(), envelopes.end(), [&](const Envelope& envelope) {
    const bool is_unasked = payload_bytes(chunk, cell, envelope) <= Interhost::kMaxUnasked;
    return is_unasked == sends || agreement_.agrees(chunk.operation, envelope.peer);
  });
}

Way InterhostExchange::way_of(const Operation& operation) const {
  if (operation.numerics != Numerics::Tree) return choose_way(links_.choice, operation);
  return way_of_tree(links_.placement, tree_.of(operation.leaves, links_.placement.size));
}

bool InterhostExchange::is_wide(const Operation& operation) const {
  return kernels::is_half(operation.dtype) && way_of(operation) == Way::Chain;
}

InterhostRunner::View InterhostExchange::view(const InFlightChunk& chunk, size_t cell) {
  const Active& active = lane_.at(chunk.operation);
  lane_.point_bases(active, chunk.total);
  const Operation& operation = active.item.operation;
  return {operation,
          chunk.cells[cell],
          lane_.runner.bases(),
          active.path == Path::Direct,
          operation.prescale != 1.0,
          is_wide(operation)};
}

size_t InterhostExchange::payload_bytes(const InFlightChunk& chunk, size_t cell, const Envelope& envelope) const {
  size_t bytes = chunk.cells[cell].bytes;
  return envelope.content == Content::Partial && is_wide(lane_.at(chunk.operation).item.operation) ? bytes * 2 : bytes;
}

void InterhostExchange::post_receives(InFlightChunk& chunk, size_t cell, const InterhostStep& step) {
  auto& receives = chunk.progress[cell].receives.emplace_back();
  if (trace::is_on()) receives.posted = trace::now();
  if (step.receives.empty()) return;
  auto where = view(chunk, cell);
  for (const Envelope& envelope : step.receives) {
    bool into_output = envelope.content == Content::Result || envelope.content == Content::Block;
    size_t bytes = payload_bytes(chunk, cell, envelope);
    std::byte* target = into_output ? where.operation.output.one_piece(where.cell.output, where.cell.bytes) : nullptr;
    bool in_place = target != nullptr;
    if (!in_place) target = chunk.scratch.take(bytes);
    receives.places.push_back(in_place ? nullptr : target);
    receives.transfers.push_back(links_.receive(envelope.peer, tag(chunk, envelope, bytes), target, bytes));
  }
}

void InterhostExchange::trace_transfers(const InFlightChunk& chunk, size_t cell, const std::vector<Envelope>& envelopes,
                                        int64_t posted, const char* direction) const {
  const Work::Place& place = lane_.at(chunk.operation).item.work->place;
  for (const Envelope& envelope : envelopes)
    trace_operation(trace::Kind::Transfer, posted, trace::now(), lane_.group,
                    {place.lane, static_cast<uint64_t>(links_.global_ranks[envelope.peer]), place.epoch},
                    payload_bytes(chunk, cell, envelope), trace::text(direction));
}

void InterhostExchange::act(InFlightChunk& chunk, size_t cell, const InterhostStep& step) {
  if (step.act == Act::Nothing) return;
  auto& progress = chunk.progress[cell];
  auto where = view(chunk, cell);
  const auto& received = progress.receives[progress.step].places;
  lane_.moved_bytes += where.cell.bytes;
  sync_point("reducing");
  switch (step.act) {
    case Act::Nothing: return;
    case Act::FoldPartial:
      progress.partial = chunk.scratch.take(InterhostRunner::partial_bytes(where));
      return runner_.fold(where, step, received, progress.partial);
    case Act::FoldResult: return runner_.fold(where, step, received, nullptr);
    case Act::Spread: return runner_.spread(where, received[0]);
  }
}

void InterhostExchange::post_sends(InFlightChunk& chunk, size_t cell, const InterhostStep& step) {
  auto& progress = chunk.progress[cell];
  progress.sends.clear();
  progress.posted = trace::is_on() ? trace::now() : 0;
  if (step.sends.empty()) return;
  auto where = view(chunk, cell);
  const auto room = [&] { return chunk.scratch.take(where.cell.bytes); };
  const std::byte* result = nullptr;  // the own output in one piece, the same for all sends
  for (const Envelope& envelope : step.sends) {
    size_t bytes = payload_bytes(chunk, cell, envelope);
    const std::byte* source = progress.partial;
    if (envelope.content == Content::Result) {
      if (!result) result = where.operation.output.readable(where.cell.output, where.cell.bytes, room);
      source = result;
    } else if (envelope.content != Content::Partial) {
      int rank = envelope.content == Content::Raw ? envelope.rank : links_.placement.rank;
      source = runner_.contribution(where, rank, room);
    }
    lane_.counters.interhost_bytes += bytes;
    progress.sends.push_back(links_.send(envelope.peer, tag(chunk, envelope, bytes), source, bytes));
  }
}

}  // namespace syncengine::hosts
