#include "engine/hosts/interhost_lane.h"

#include <algorithm>
#include <utility>

#include "base/alignment.h"
#include "base/error.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

namespace {

// Of a chunk between hosts. More and smaller slots than within one, since a hop takes long; the same on all hosts, since a
// chunk's cells must fit each other whatever its path within a host.
constexpr size_t kInterhostSlots = 8;
constexpr size_t kInterhostSlotBytes = 128 << 10;
static_assert(kInterhostSlots * kInterhostSlotBytes == shm::kSlots * shm::kSlotBytes);
// Where no rank needs slots, since each is alone on its host.
constexpr size_t kCellBytes = InterhostChoice::kMostCell;
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

}  // namespace

InterhostLane::InterhostLane(const Links& links, const Group& locals, int id, Algorithm algorithm,
                             std::function<bool()> stop, Trash& trash)
    : Lane(locals, id, algorithm, std::move(stop), trash), links_(links), interhost_runner_(links.placement) {
  slots_ = kInterhostSlots;
  slot_bytes_ = kInterhostSlotBytes;
  always_slots_ = true;
  for (int member : links.counterparts) everybody_ |= uint64_t{1} << member;
}

size_t InterhostLane::all_reduce_chunk(const Placement& placement) {
  return placement.stripes == 1 ? chunk_bytes_alone(Collective::AllReduce, placement) : kInterhostSlotBytes;
}

void InterhostLane::hear(int member, const Opened& opened) {
  Heard& heard = heard_[member];
  if (opened.number != heard.first + heard.records.size() || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent an operation out of turn");
  heard.records.push_back(opened.record);
}

void InterhostLane::hear(int member, const Flags& flags) {
  if (flags.number < retired_ || flags.number >= retired_ + 2 * shm::kRecords || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent flags out of turn");
  Merged& merged = flags_[flags.number];
  merged.heard |= uint64_t{1} << member;
  for (size_t i = 0; i < shm::kFlagWords; ++i) merged.words[i] |= flags.words[i];
}

bool InterhostLane::open() {
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
size_t InterhostLane::cut(uint64_t operation, Active& active) {
  const Operation& asked = active.item.operation;
  const Placement& placement = links_.placement;
  bool plain = asked.prescale == 1.0;
  active.path = Path::Staged;
  if (group_.size == 1 && plain) {
    active.path = Path::Direct;
    active.spans = {asked.input};
  } else if (active.in_arena && group_.size > 1 && asked.collective != Collective::AllGather &&
             algorithm_ != Algorithm::Staged && algorithm_ != Algorithm::OneShot) {
    active.path = Path::Direct;
    if (!find_peers_spans(operation, active)) return 0;
  }
  if (placement.stripes == 1 && plain) {
    if (is_wide(asked)) return Interhost::kMaxTransfer / 2;  // of which a running sum takes twice as many bytes
    bool in_cells = asked.collective == Collective::AllReduce && choose_way(links_.choice, asked) != Way::Chain;
    size_t most = chunk_bytes_alone(asked.collective, placement);
    return in_cells ? std::min(most, links_.choice.cell * static_cast<size_t>(placement.size)) : most;
  }
  bool in_parts = asked.collective == Collective::ReduceScatter || asked.collective == Collective::AllGather;
  return in_parts ? whole_lines(slot_bytes_ / placement.size) : slot_bytes_;
}

void InterhostLane::plan(const Chunk& chunk) {
  Chunk global = chunk;
  global.rank = links_.placement.rank;
  global.world = links_.placement.size;
  plan_inside(links_.placement, global, plan_);
}

uint64_t InterhostLane::agreed(uint64_t operation) {
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

bool InterhostLane::verify(uint64_t operation, Active& active) {
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
bool InterhostLane::merge_flags(uint64_t operation, Active& active, bool complete_here) {
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

// The own bit: this rank's envelopes still leave its memory.
uint64_t InterhostLane::pull_blockers(bool all) const {
  uint64_t members = behind(&shm::LaneProgress::reduced, pulled_.total + 1, all);
  for (const auto& flight : flights_)
    if (flight->total == pulled_.total && !flight->quiet()) members |= uint64_t{1} << group_.rank;
  return members;
}

uint64_t InterhostLane::remote_blocking_ranks() const {
  if (active_.empty()) return 0;
  auto found = agreed_.find(retired_);
  if (uint64_t members = everybody_ & ~(found == agreed_.end() ? 0 : found->second)) return members;
  uint64_t members = 0;
  for (const auto& flight : flights_) {
    for (size_t i = 0; i < flight->cells.size(); ++i) {
      const auto& progress = flight->progress[i];
      bool is_posted = progress.acted || progress.step < progress.receives.size();
      if (progress.step == flight->cells[i].steps.size() || !is_posted) continue;
      const InterhostStep& step = flight->cells[i].steps[progress.step];
      const auto& envelopes = progress.acted ? step.sends : step.receives;
      const auto& transfers = progress.acted ? progress.sends : progress.receives[progress.step].transfers;
      for (size_t k = 0; k < envelopes.size(); ++k)
        if (!transfers[k]->ended()) members |= uint64_t{1} << envelopes[k].peer;
    }
    if (members) break;
  }
  return members;
}

void InterhostLane::fail_all(const std::exception_ptr& error) {
  flights_.clear();
  Lane::fail_all(error);
}

}  // namespace syncengine::hosts
