// Communicator.split(): the members agree on who is in, and tell each other where their blocks lie.
#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/texts.h"
#include "engine/communicator/engine_communicator.h"

namespace syncengine {

struct EngineCommunicator::Ticket {
  uint64_t offset = 0;   // of this rank's block for the new group
  uint64_t members = 0;  // bit per rank of the parent; 0: stays out
  uint64_t number = 0;   // between hosts: the new communicator's, from its first member
};

std::shared_ptr<Communicator> EngineCommunicator::split(const std::vector<int>& ranks,
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
  bool reaches_out = std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return on_other_host(rank); });
  auto expected = reaches_out ? interhost_->expect_group() : nullptr;
  if (reaches_out && std::countr_zero(mine.members) == rank()) mine.number = interhost_->take_number();

  auto tickets = std::make_shared<std::vector<Ticket>>(size());
  Operation gather{.collective = Collective::AllGather,
                   .dtype = DType::UInt8,
                   .input = {&mine, sizeof(mine)},
                   .output = {tickets->data(), tickets->size() * sizeof(Ticket)}};
  gather.describe = [] { return std::string("Communicator.split()"); };
  gather.layout_hash = 0x73706c6974;  // "split": no other all_gather matches it
  run(std::move(gather), interrupted);
  if (!mine.members) return nullptr;

  auto name = [&](int rank) { return rank_names(global_ranks(), uint64_t{1} << rank); };
  auto names = [&](uint64_t mask) { return mask == 0 ? "none" : rank_names(global_ranks(), mask); };
  std::vector<int> members;
  for (int rank = 0; rank < size(); ++rank) {
    if (!(mine.members >> rank & 1)) continue;
    if ((*tickets)[rank].members != mine.members) {
      std::string text = "split: " + name(this->rank()) + " named " + names(mine.members) + ", " + name(rank) +
                         " named " + names((*tickets)[rank].members);
      abort(ErrorKind::Mismatch, text);
      throw Error(ErrorKind::Mismatch, text);
    }
    members.push_back(rank);
  }
  return join(members, *tickets);
}

std::shared_ptr<Communicator> EngineCommunicator::join(const std::vector<int>& members,
                                                       const std::vector<Ticket>& tickets) {
  std::vector<int> labels, globals, locals;
  std::vector<uint64_t> offsets;
  for (int member : members) {
    labels.push_back(placement_.host_of[member]);
    globals.push_back(global_ranks_[member]);
    if (on_other_host(member)) continue;
    locals.push_back(group_.local_ranks[placement_.local_index(member)]);
    offsets.push_back(tickets[member].offset);
  }
  auto own = std::find(members.begin(), members.end(), rank());
  Placement placement(static_cast<int>(own - members.begin()), labels);
  std::unique_ptr<InterhostPart> interhost;
  if (placement.hosts() > 1)
    interhost = interhost_->split(tickets[members.front()].number, placement, members, globals);
  return create(engine_, std::move(placement), std::move(globals), std::move(locals), std::move(offsets), Origin::Split,
                std::move(interhost));
}

}  // namespace syncengine
