#include "engine/hosts/host_lane.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sync_point.h"
#include "engine/mismatch.h"

namespace syncengine::hosts {

namespace {

// Of a chunk between hosts. More and smaller slots than within one, since a hop takes long; the same on all hosts, since a
// chunk's cells must fit each other whatever its path within a host.
constexpr size_t kHopSlots = 8;
constexpr size_t kHopSlotBytes = 128 << 10;
static_assert(kHopSlots * kHopSlotBytes == shm::kSlots * shm::kSlotBytes);
// Where no rank needs slots, since each is alone on its host.
constexpr size_t kCellBytes = 256 << 10;
constexpr size_t kScratchBytes = 2 << 20;  // of a chunk of reduce-scatter

constexpr size_t kLine = 64;

size_t whole_lines(size_t bytes) { return std::max(kLine, bytes / kLine * kLine); }

size_t chunk_bytes_alone(Collective collective, const Placement& placement) {
  size_t size = static_cast<size_t>(placement.size);
  switch (collective) {
    case Collective::AllReduce: return std::min(Interhost::kMaxTransfer, kCellBytes * size);
    case Collective::ReduceScatter: return whole_lines(std::min(kCellBytes, kScratchBytes / size));
    default: return kCellBytes;
  }
}

}  // namespace

HostLane::HostLane(const Links& links, const Group& locals, int id, Algorithm algorithm, std::function<bool()> stop,
                   Trash& trash)
    : Lane(locals, id, algorithm, std::move(stop), trash), links_(links), hop_runner_(links.placement) {
  slots_ = kHopSlots;
  slot_bytes_ = kHopSlotBytes;
  always_slots_ = true;
  for (int member : links.counterparts) everybody_ |= uint64_t{1} << member;
}

void HostLane::hear(int member, const Opened& opened) {
  Heard& heard = heard_[member];
  if (opened.number != heard.first + heard.records.size() || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent an operation out of turn");
  heard.records.push_back(opened.record);
}

void HostLane::hear(int member, const Flags& flags) {
  if (flags.number < retired_ || flags.number >= retired_ + 2 * shm::kRecords || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent flags out of turn");
  Merged& merged = flags_[flags.number];
  merged.heard |= uint64_t{1} << member;
  for (size_t i = 0; i < shm::kFlagWords; ++i) merged.words[i] |= flags.words[i];
}

bool HostLane::open() {
  if (!Lane::open()) return false;
  uint64_t number = opened_ - 1;
  Opened opened{.head = {},
                .lane = static_cast<uint64_t>(id_),
                .number = number,
                .record = group_.own().lanes[id_].records[number % shm::kRecords]};
  for (int member : links_.counterparts) links_.tell(member, opened);
  return true;
}

// The path may differ between hosts, the cut may not.
size_t HostLane::cut(uint64_t operation, Active& active) {
  const Operation& asked = active.item.operation;
  const Placement& placement = links_.placement;
  bool plain = asked.prescale == 1.0;
  active.path = Path::Staged;
  if (group_.size == 1 && plain) {
    active.path = Path::Direct;
    active.spans = {asked.input};
  } else if (active.in_arena && group_.size > 1 && asked.collective != Collective::AllGather &&
             (algorithm_ == Algorithm::Auto || algorithm_ == Algorithm::Direct)) {
    active.path = Path::Direct;
    if (!find_peers_spans(operation, active)) return 0;
  }
  if (placement.stripes == 1 && plain) return chunk_bytes_alone(asked.collective, placement);
  bool in_parts = asked.collective == Collective::ReduceScatter || asked.collective == Collective::AllGather;
  return in_parts ? whole_lines(slot_bytes_ / placement.size) : slot_bytes_;
}

void HostLane::plan(const Chunk& chunk) {
  Chunk global = chunk;
  global.rank = links_.placement.rank;
  global.world = links_.placement.size;
  plan_inside(links_.placement, global, plan_);
}

uint64_t HostLane::agreed(uint64_t operation) {
  uint64_t& members = agreed_[operation];
  if (members == everybody_) return members;
  const shm::OpRecord& mine = group_.own().lanes[id_].records[operation % shm::kRecords];
  for (int member : links_.counterparts) {
    uint64_t bit = uint64_t{1} << member;
    Heard& heard = heard_[member];
    if (members & bit || operation >= heard.first + heard.records.size()) continue;
    require_same(links_.global_ranks[links_.placement.rank], mine, links_.global_ranks[member],
                 heard.records[operation - heard.first], at(operation).item.operation);
    members |= bit;
  }
  return members;
}

bool HostLane::verify(uint64_t operation, Active& active) {
  bool here = Lane::verify(operation, active);
  bool there = agreed(operation) == everybody_;
  bool complete = merge_flags(operation, active, here) && here && there;
  if (complete) {
    // What was compared is needed no more.
    for (auto& [member, heard] : heard_) {
      for (; heard.first < retired_; ++heard.first) heard.records.pop_front();
    }
    agreed_.erase(agreed_.begin(), agreed_.lower_bound(retired_));
    flags_.erase(flags_.begin(), flags_.lower_bound(retired_));
  }
  return complete;
}

// Hosts tell each other what any of their ranks has set. True once all have.
bool HostLane::merge_flags(uint64_t operation, Active& active, bool complete_here) {
  const Operation& asked = active.item.operation;
  if (asked.flag_words == 0) return true;
  Merged& merged = flags_[operation];
  if (complete_here && !std::exchange(merged.told, true)) {
    Flags flags{.head = {}, .lane = static_cast<uint64_t>(id_), .number = operation, .words = {}};
    std::copy_n(asked.flags, asked.flag_words, flags.words);
    for (int member : links_.counterparts) links_.tell(member, flags);
  }
  if (merged.heard != everybody_) return false;
  for (size_t i = 0; i < asked.flag_words; ++i) asked.flags[i] |= merged.words[i];
  return true;
}

bool HostLane::reduce_one() {
  while (!flights_.empty() && flights_.front()->total < pulled_.total) {
    landed_.push_back(std::move(flights_.front()));
    flights_.pop_front();
  }
  start_flights();
  bool moved = false;
  for (auto& flight : flights_) moved |= advance(*flight);
  if (reduced_.total == started_.total) return moved;
  if (!flights_[reduced_.total - flights_.front()->total]->arrived()) return moved;
  step(reduced_, &shm::LaneProgress::reduced, "reduced");
  return true;
}

void HostLane::start_flights() {
  for (; started_.total < staged_.total; ++started_.total) {
    const Active& active = at(started_.operation);
    const Operation& operation = active.item.operation;
    if (landed_.empty()) landed_.push_back(std::make_unique<Flight>());
    auto flight = std::move(landed_.back());
    landed_.pop_back();
    flight->operation = started_.operation;
    flight->chunk = started_.chunk;
    flight->total = started_.total;
    size_t block = block_bytes(operation), begin = started_.chunk * active.chunk_bytes;
    Way way = choose_way(links_.placement, operation);
    plan_hop(links_.placement,
             {.collective = operation.collective,
              .way = way,
              .root = operation.root,
              .block = block,
              .begin = begin,
              .length = std::min(block - begin, active.chunk_bytes),
              .relay = is_long(operation) && links_.placement.hosts() > 2},
             flight->cells);
    flight->progress.assign(flight->cells.size(), {});
    flight->scratch.clear();
    flights_.push_back(std::move(flight));
    if (++started_.chunk == active.chunks) {
      started_.chunk = 0;
      ++started_.operation;
    }
  }
}

bool HostLane::advance(Flight& flight) {
  bool moved = false;
  for (size_t cell = 0; cell < flight.cells.size(); ++cell) moved |= advance(flight, cell);
  return moved;
}

bool HostLane::advance(Flight& flight, size_t cell) {
  using Phase = Flight::Progress::Phase;
  Flight::Progress& progress = flight.progress[cell];
  const auto& steps = flight.cells[cell].steps;
  bool moved = false;
  for (; progress.step < steps.size(); moved = true) {
    const HopStep& step = steps[progress.step];
    if (progress.phase == Phase::Entering) {
      if (!may_receive(flight, step)) return moved;
      post_receives(flight, cell);
      progress.phase = Phase::Receiving;
      continue;
    }
    for (const auto& transfer : progress.transfers) {
      if (!transfer->ended()) return moved;
      if (transfer->state() == Interhost::Transfer::State::Failed)
        throw Error(transfer->error().kind(), std::string(transfer->error().what()) + " while " +
                                                  links_.name(links_.placement.rank) + " was in " +
                                                  describe(at(flight.operation).item.operation));
    }
    if (progress.phase == Phase::Sending) {
      ++progress.step;
      progress.phase = Phase::Entering;
      continue;
    }
    if (step.staged) {
      if (is_behind(&shm::LaneProgress::staged, flight.total + 1)) return moved;
      verify(flight.operation, at(flight.operation));
    }
    act(flight, cell);
    post_sends(flight, cell);
    progress.phase = Phase::Sending;
    progress.arrived = progress.step + 1 == steps.size();
  }
  return moved;
}

// What a peer sends is taken only if it means the same operation, and so the same bytes.
bool HostLane::may_receive(const Flight& flight, const HopStep& step) {
  if (step.receives.empty()) return true;
  uint64_t members = agreed(flight.operation);
  for (const Parcel& parcel : step.receives)
    if (!(members >> parcel.peer & 1)) return false;
  return true;
}

HopRunner::View HostLane::view(const Flight& flight, size_t cell) {
  const Active& active = at(flight.operation);
  point_bases(active, flight.total);
  const Operation& operation = active.item.operation;
  bool is_half = operation.dtype == DType::Float16 || operation.dtype == DType::BFloat16;
  return {operation,
          flight.cells[cell],
          runner_.bases(),
          active.path == Path::Direct,
          operation.prescale != 1.0,
          is_half && choose_way(links_.placement, operation) == Way::Chain};
}

void HostLane::post_receives(Flight& flight, size_t cell) {
  auto& progress = flight.progress[cell];
  const HopStep& step = flight.cells[cell].steps[progress.step];
  progress.transfers.clear();
  progress.received.clear();
  if (step.receives.empty()) return;
  auto where = view(flight, cell);
  for (const Parcel& parcel : step.receives) {
    bool into_output = parcel.content == Content::Result || parcel.content == Content::Block;
    size_t bytes = parcel.content == Content::Partial ? HopRunner::partial_bytes(where) : where.cell.bytes;
    std::byte* target = into_output ? hop_runner_.output(where) : nullptr;
    bool in_place = target != nullptr;
    if (!in_place) target = flight.scratch.take(bytes);
    progress.received.push_back(in_place ? nullptr : target);
    progress.transfers.push_back(links_.receive(parcel.peer, tag(flight, parcel), target, bytes));
  }
}

void HostLane::act(Flight& flight, size_t cell) {
  auto& progress = flight.progress[cell];
  const HopStep& step = flight.cells[cell].steps[progress.step];
  if (step.act == Act::Nothing) return;
  auto where = view(flight, cell);
  moved_bytes_ += where.cell.bytes;
  sync_point("reducing");
  switch (step.act) {
    case Act::Nothing: return;
    case Act::FoldPartial:
      progress.partial = flight.scratch.take(HopRunner::partial_bytes(where));
      return hop_runner_.fold_partial(where, step, progress.received, progress.partial);
    case Act::FoldResult: return hop_runner_.fold_result(where, step, progress.received);
    case Act::Spread: return hop_runner_.spread(where, progress.received[0]);
  }
}

void HostLane::post_sends(Flight& flight, size_t cell) {
  auto& progress = flight.progress[cell];
  const HopStep& step = flight.cells[cell].steps[progress.step];
  progress.transfers.clear();
  if (step.sends.empty()) return;
  auto where = view(flight, cell);
  const std::byte* gathered = nullptr;  // the own output or input, where it is in pieces
  for (const Parcel& parcel : step.sends) {
    size_t bytes = where.cell.bytes;
    const std::byte* source = nullptr;
    if (parcel.content == Content::Partial) {
      source = progress.partial;
      bytes = HopRunner::partial_bytes(where);
    } else if (parcel.content == Content::Result) {
      source = hop_runner_.output(where);
      if (!source && !gathered) {
        std::byte* copy = flight.scratch.take(bytes);
        hop_runner_.gather_output(where, copy);
        gathered = copy;
      }
    } else {
      int rank = parcel.content == Content::Raw ? parcel.rank : links_.placement.rank;
      source = hop_runner_.contribution(where, rank);
      if (!source && bytes > 0) {
        std::byte* copy = flight.scratch.take(bytes);
        hop_runner_.gather_contribution(where, rank, copy);
        source = copy;
      }
    }
    if (!source) source = gathered;
    counters_.interhost_bytes += bytes;
    progress.transfers.push_back(links_.send(parcel.peer, tag(flight, parcel), source, bytes));
  }
}

// The own bit: this rank's parcels still leave its memory.
uint64_t HostLane::pull_blockers(bool all) const {
  uint64_t members = behind(&shm::LaneProgress::reduced, pulled_.total + 1, all);
  for (const auto& flight : flights_)
    if (flight->total == pulled_.total && !flight->quiet()) members |= uint64_t{1} << group_.rank;
  return members;
}

uint64_t HostLane::remote_culprits() const {
  if (active_.empty()) return 0;
  auto found = agreed_.find(retired_);
  if (uint64_t members = everybody_ & ~(found == agreed_.end() ? 0 : found->second)) return members;
  uint64_t members = 0;
  for (const auto& flight : flights_) {
    for (size_t i = 0; i < flight->cells.size(); ++i) {
      const auto& progress = flight->progress[i];
      if (progress.step == flight->cells[i].steps.size() || progress.phase == Flight::Progress::Phase::Entering)
        continue;
      const HopStep& step = flight->cells[i].steps[progress.step];
      const auto& parcels = progress.phase == Flight::Progress::Phase::Sending ? step.sends : step.receives;
      for (size_t k = 0; k < parcels.size(); ++k)
        if (!progress.transfers[k]->ended()) members |= uint64_t{1} << parcels[k].peer;
    }
    if (members) break;
  }
  return members;
}

void HostLane::fail_all(const std::exception_ptr& error) {
  flights_.clear();
  Lane::fail_all(error);
}

}  // namespace syncengine::hosts
