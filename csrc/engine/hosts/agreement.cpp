#include "engine/hosts/interhost_exchange.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

Agreement::Agreement(const Links& links, LaneState& lane) : links_(links), lane_(lane) {
  for (int member : links.counterparts) everybody_ |= uint64_t{1} << member;
}

void Agreement::on_opened(uint64_t operation) {
  Opened opened{.head = {},
                .lane = static_cast<uint64_t>(lane_.id),
                .number = operation,
                .record = lane_.record(lane_.group.rank, operation)};
  for (int member : links_.counterparts) links_.tell(member, opened);
}

void Agreement::hear(int member, const Opened& opened) {
  Heard& heard = heard_[member];
  if (opened.number != heard.first + heard.records.size() || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent an operation out of turn");
  heard.records.push_back(opened.record);
}

void Agreement::hear(int member, const Flags& flags) {
  if (flags.number < lane_.retired || flags.number >= lane_.retired + 2 * shm::kRecords || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent flags out of turn");
  Merged& merged = flags_[flags.number];
  merged.heard |= uint64_t{1} << member;
  for (size_t i = 0; i < shm::kFlagWords; ++i) merged.words[i] |= flags.words[i];
}

uint64_t Agreement::agreed(uint64_t operation) {
  uint64_t& members = agreed_[operation];
  if (members == everybody_) return members;
  const shm::OpRecord& mine = lane_.record(lane_.group.rank, operation);
  for (int member : links_.counterparts) {
    uint64_t bit = uint64_t{1} << member;
    Heard& heard = heard_[member];
    if (members & bit || operation >= heard.first + heard.records.size()) continue;
    require_same(links_.global_ranks[links_.placement.rank], mine, links_.global_ranks[member],
                 heard.records[operation - heard.first], lane_.at(operation).item.operation);
    members |= bit;
  }
  return members;
}

bool Agreement::compare(uint64_t operation, LaneState::Active& active) {
  bool here = lane_.compare(operation, active);
  bool there = agreed(operation) == everybody_;
  bool complete = merge_flags(operation, active, here) && here && there;
  if (complete) {
    // What was compared is needed no more.
    for (auto& [member, heard] : heard_) {
      for (; heard.first < lane_.retired; ++heard.first) heard.records.pop_front();
    }
    agreed_.erase(agreed_.begin(), agreed_.lower_bound(lane_.retired));
    flags_.erase(flags_.begin(), flags_.lower_bound(lane_.retired));
  }
  return complete;
}

// Hosts tell each other what any of their ranks has set. True once all have.
bool Agreement::merge_flags(uint64_t operation, LaneState::Active& active, bool complete_here) {
  const Operation& asked = active.item.operation;
  if (asked.flag_words == 0) return true;
  Merged& merged = flags_[operation];
  if (complete_here && !std::exchange(merged.told, true)) {
    Flags flags{.head = {}, .lane = static_cast<uint64_t>(lane_.id), .number = operation, .words = {}};
    std::copy_n(asked.flags, asked.flag_words, flags.words);
    for (int member : links_.counterparts) links_.tell(member, flags);
  }
  if (merged.heard != everybody_) return false;
  for (size_t i = 0; i < asked.flag_words; ++i) asked.flags[i] |= merged.words[i];
  return true;
}

uint64_t Agreement::missing(uint64_t operation) const {
  auto found = agreed_.find(operation);
  return everybody_ & ~(found == agreed_.end() ? 0 : found->second);
}

}  // namespace syncengine::hosts
