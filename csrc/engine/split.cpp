// Communicator.split(): the members agree on who is in, and tell each other where their blocks lie.
#include <algorithm>

#include "base/error.h"
#include "engine/shm_communicator.h"

namespace syncengine {

namespace {

struct Ticket {
  uint64_t offset = 0;   // of this rank's block for the new group
  uint64_t members = 0;  // bit per rank of the parent; 0: stays out
};

}  // namespace

std::shared_ptr<Communicator> ShmCommunicator::split(const std::vector<int>& ranks,
                                                     const std::function<void()>& interrupted) {
  throw_if_failed();
  Ticket mine;
  for (int rank : ranks) {
    if (rank < 0 || rank >= size())
      throw Error(ErrorKind::InvalidUsage,
                  "split: rank " + std::to_string(rank) + " is not in 0.." + std::to_string(size() - 1));
    if (mine.members >> rank & 1)
      throw Error(ErrorKind::InvalidUsage, "split: rank " + std::to_string(rank) + " is named twice");
    mine.members |= uint64_t{1} << rank;
  }
  if (mine.members && !(mine.members >> rank() & 1))
    throw Error(ErrorKind::InvalidUsage, "split: rank " + std::to_string(rank()) +
                                             " must be among the ranks it names, or pass none to stay out");
  if (mine.members) mine.offset = engine_->arena()->allocate_group(sizeof(shm::GroupBlock));

  auto tickets = std::make_shared<std::vector<Ticket>>(size());
  Operation gather{.collective = Collective::AllGather,
                   .dtype = DType::UInt8,
                   .input = {&mine, sizeof(mine)},
                   .output = {tickets->data(), tickets->size() * sizeof(Ticket)}};
  gather.describe = [] { return std::string("Communicator.split()"); };
  gather.layout_hash = 0x73706c6974;  // "split": no other all_gather matches it
  run(std::move(gather), interrupted);
  if (!mine.members) return nullptr;

  std::vector<int> members, locals;
  std::vector<uint64_t> offsets;
  for (int rank = 0; rank < size(); ++rank) {
    if (!(mine.members >> rank & 1)) continue;
    if ((*tickets)[rank].members != mine.members) {
      std::string text = "split: " + group_.name(this->rank()) + " named " + group_.names(mine.members) + ", " +
                         group_.name(rank) + " named " +
                         ((*tickets)[rank].members ? group_.names((*tickets)[rank].members) : "none");
      abort(ErrorKind::Mismatch, text);
      throw Error(ErrorKind::Mismatch, text);
    }
    members.push_back(group_.global_ranks[rank]);
    locals.push_back(group_.local_ranks[rank]);
    offsets.push_back((*tickets)[rank].offset);
  }
  int rank_in_group = static_cast<int>(std::count_if(ranks.begin(), ranks.end(), [&](int r) { return r < rank(); }));
  return std::make_shared<ShmCommunicator>(engine_, rank_in_group, members, locals, offsets, Origin::Split);
}

}  // namespace syncengine
