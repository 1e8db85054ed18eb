#include <algorithm>
#include <utility>

#include "base/error.h"
#include "engine/hosts/interhost_exchange.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

Agreement::Agreement(const Links& links, LaneState& lane) : links_(links), lane_(lane) {
  for (int member : links_.counterparts) everybody_ |= uint64_t{1} << member;
}

void Agreement::on_opened(uint64_t operation) {
  Opened opened{.lane = static_cast<uint64_t>(lane_.id),
                .number = operation,
                .record = lane_.record(lane_.group.rank, operation)};
  for (int member : links_.counterparts) links_.tell(member, opened);
}

void Agreement::require_turn(int member, uint64_t number, bool is_next) const {
  if (!is_next || number < lane_.retired || number >= lane_.retired + 2 * shm::kRecords || !(everybody_ >> member & 1))
    throw Error(ErrorKind::PeerLost, links_.name(member) + " sent an operation out of turn");
}

void Agreement::hear(int member, const Checked<Opened>& opened) {
  require_turn(member, opened->number, opened->number == opened_[member]++);
  said_[opened->number].records.emplace_back(member, check(opened->record, links_.global_ranks[member]));
}

void Agreement::hear(int member, const Checked<Flags>& flags) {
  require_turn(member, flags->number);
  Said& said = said_[flags->number];
  said.flags_of |= uint64_t{1} << member;
  for (size_t i = 0; i < shm::kFlagWords; ++i) said.flags[i] |= flags->words[i];
}

uint64_t Agreement::agreed(uint64_t operation) {
  Said& said = said_[operation];
  for (const auto& [member, record] : std::exchange(said.records, {})) {
    require_same(links_.global_ranks[links_.placement.rank], lane_.checked_record(lane_.group.rank, operation),
                 links_.global_ranks[member], record, lane_.at(operation).item.operation);
    said.agreed |= uint64_t{1} << member;
  }
  return said.agreed;
}

bool Agreement::compare(uint64_t operation, LaneState::Active& active) {
  bool here = lane_.compare(operation, active);
  bool there = agreed(operation) == everybody_;
  bool complete = merge_flags(operation, active, here) && here && there;
  if (complete) said_.erase(said_.begin(), said_.lower_bound(lane_.retired));  // compared: no longer needed
  return complete;
}

// Merges the operation's flags: each host tells the others which ones its ranks set. Returns true once all have told.
bool Agreement::merge_flags(uint64_t operation, LaneState::Active& active, bool complete_here) {
  const Operation& asked = active.item.operation;
  if (asked.flag_words == 0) return true;
  Said& said = said_[operation];
  if (complete_here && !std::exchange(said.told, true)) {
    Flags flags{.lane = static_cast<uint64_t>(lane_.id), .number = operation};
    std::copy_n(asked.flags, asked.flag_words, flags.words);
    for (int member : links_.counterparts) links_.tell(member, flags);
  }
  if (said.flags_of != everybody_) return false;
  for (size_t i = 0; i < asked.flag_words; ++i) asked.flags[i] |= said.flags[i];
  return true;
}

uint64_t Agreement::missing(uint64_t operation) const {
  auto found = said_.find(operation);
  return everybody_ & ~(found == said_.end() ? 0 : found->second.agreed);
}

}  // namespace syncengine::hosts
