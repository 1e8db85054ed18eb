// Communicator.split(): the members agree on who is in, and tell each other where their blocks lie.
#include <algorithm>
#include <bit>

#include "base/error.h"
#include "base/texts.h"
#include "engine/communicator/shm_communicator.h"

namespace syncengine {

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
  auto expected = mine.members ? expect_group() : nullptr;
  if (std::countr_zero(mine.members) == rank()) mine.number = take_number(mine.members);

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

std::shared_ptr<Communicator> ShmCommunicator::join(const std::vector<int>& members,
                                                    const std::vector<Ticket>& tickets) {
  std::vector<int> globals, locals;
  std::vector<uint64_t> offsets;
  for (int member : members) {
    globals.push_back(group_.global_ranks[member]);
    locals.push_back(group_.local_ranks[member]);
    offsets.push_back(tickets[member].offset);
  }
  auto own = std::find(members.begin(), members.end(), group_.rank);
  int rank = static_cast<int>(own - members.begin());
  return std::make_shared<ShmCommunicator>(engine_, rank, globals, locals, offsets, Origin::Split);
}

}  // namespace syncengine
