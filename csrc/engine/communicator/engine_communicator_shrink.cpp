// EngineCommunicator::shrink(): the members that are left go on in a new communicator, over the memory of the old one's
// engine: nothing is connected anew.

#include <thread>

#include "base/sync_point.h"
#include "base/texts.h"
#include "engine/communicator/engine_communicator.h"
#include "engine/communicator/succession.h"

namespace syncengine {

namespace {

constexpr std::chrono::microseconds kLook{200};  // between two looks

}  // namespace

std::shared_ptr<Communicator> EngineCommunicator::shrink(Duration patience, const std::function<void()>& interrupted,
                                                         uint64_t without) {
  engine_->throw_if_forked();
  if (interhost_)
    throw Error(ErrorKind::InvalidUsage,
                "shrink: the communicator spans several hosts, which can't agree on who is left: connect anew by "
                "syncengine.init()");
  auto& own = group_.own().succession;
  if (own.arrived.load(std::memory_order_relaxed) != 0)  // relaxed: its only writer
    throw Error(ErrorKind::InvalidUsage,
                "shrink: the communicator was closed, or has been shrunk before: shrink the one that came of it");
  // What is pending ends here, and on all members, before anybody may go on.
  engine_->locked([&] { fail(ErrorKind::Aborted, group_.name(group_.rank) + " shrinks the communicator"); });
  std::vector<Ticket> tickets(size());
  const uint64_t offset = engine_->arena()->allocate_group(sizeof(shm::GroupBlock));
  sync_point("arriving");
  own.arrived.store(offset, std::memory_order_release);  // release: all that this rank did in the old communicator
  sync_point("arrived");
  const uint64_t members = await_decision(Deadline::after(patience), patience, interrupted, without);
  std::vector<int> left;
  for (int member = 0; member < size(); ++member) {
    if (!(members >> member & 1)) continue;
    left.push_back(member);
    tickets[member].offset = group_.block(member).succession.arrived.load(std::memory_order_acquire);  // acquire: above
  }
  for (int member : dead()) group_.arenas[member]->discard_pool();  // all who are left have ended what read there
  auto next = join(left, tickets, origin_);
  origin_ = Origin::Split;  // what ends the job's communicator ends the new one, and no longer this one
  return next;
}

uint64_t EngineCommunicator::await_decision(Deadline patient_until, Duration patience,
                                            const std::function<void()>& interrupted, uint64_t without) {
  const uint64_t everybody = size() == 64 ? ~uint64_t{0} : (uint64_t{1} << size()) - 1;
  auto& decision = group_.block(0).succession.decision;
  for (;;) {
    // Before it is looked who is there: what is decided meanwhile, a proposal finds.
    const uint64_t decided = decision.load(std::memory_order_acquire);  // acquire: what the proposer saw
    uint64_t arrived = 0, gone = without;
    for (int member = 0; member < size(); ++member) {
      const uint64_t bit = uint64_t{1} << member;
      if (engine_->locked([&] { return engine_->is_dead(group_.local_ranks[member]); })) gone |= bit;
      const uint64_t word =
          group_.block(member).succession.arrived.load(std::memory_order_acquire);  // acquire: as above
      if (word == shm::kNeverComes) gone |= bit;
      if (word > shm::kNeverComes) arrived |= bit;
    }
    const auto [what, members] = succeed(group_.rank, everybody, decided, arrived, gone, patient_until.passed());
    if (what == Succession::Do::Join) return members;
    if (what == Succession::Do::Fenced)
      throw Error(ErrorKind::Aborted, rank_names(global_ranks_, members) + " went on without " +
                                          group_.name(group_.rank) +
                                          ", which had not come to shrink() when they had "
                                          "waited long enough (" +
                                          seconds_text(patience) +
                                          " by its own patience): "
                                          "end this process, or start it anew to join them");
    if (what == Succession::Do::Propose) {
      sync_point("proposing");
      uint64_t none = 0;
      decision.compare_exchange_strong(none, members, std::memory_order_acq_rel);  // what all saw, for all
      sync_point("proposed");
      continue;
    }
    if (interrupted) interrupted();
    std::this_thread::sleep_for(kLook);
  }
}

}  // namespace syncengine
