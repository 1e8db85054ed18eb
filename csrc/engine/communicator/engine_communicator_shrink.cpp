// EngineCommunicator::shrink(): the members that are left go on in a new communicator, over the old one's engine and
// the existing connections between hosts: nothing is connected anew.

#include <exception>
#include <thread>

#include "base/error.h"
#include "base/sync_point.h"
#include "base/texts.h"
#include "engine/communicator/engine_communicator.h"
#include "engine/hosts/succession.h"

namespace syncengine {

namespace {

constexpr std::chrono::microseconds kLook{200};  // between two looks

// Collects everything by which succeed() decides who goes on, except for how long nothing has changed. Writes the lists
// of members that other hosts have told into memory that this host's members share.
Outlook look_around(Engine& engine, const Members& members, uint64_t without) {
  const Placement& placement = members.placement;
  const Group& group = members.group;
  auto& shared = group.block(0).succession;
  Outlook sees{.me = placement.rank, .host = static_cast<size_t>(placement.host), .gone = without};
  for (const auto& on_host : placement.members) {
    sees.hosts.push_back(0);
    for (int member : on_host) sees.hosts.back() |= uint64_t{1} << member;
  }
  // The host's decision (`word`) is read before its members' state: if it changes later, the compare-and-swap fails.
  sees.own.word = shared.word.load(std::memory_order_acquire);  // acquire: what its writer had seen; likewise below
  sees.own.members = shared.members.load(std::memory_order_acquire);
  engine.locked([&] {
    for (int member : placement.locals()) {
      const uint64_t bit = uint64_t{1} << member;
      const int local = placement.local_index(member);
      if (engine.locals().is_dead(group.local_ranks[local])) sees.gone |= bit;
      const uint64_t word = group.block(local).succession.arrived.load(std::memory_order_acquire);  // acquire: as above
      if (word == shm::kNeverComes) sees.gone |= bit;
      if (word > shm::kNeverComes) sees.arrived |= bit;
    }
    sees.ended = sees.gone;
    if (members.interhost) members.interhost->look_around(sees);
  });
  uint64_t told = 0;
  for (const HostVerdict& other : sees.others) told |= other.members;
  shared.members.fetch_or(told, std::memory_order_acq_rel);  // before the word says anything of these members
  return sees;
}

// Takes part in the agreement on which members are left, and returns them. Throws if this rank is not one of them.
uint64_t await_decision(Engine& engine, const Members& members, Duration patience,
                        const std::function<void()>& interrupted, uint64_t without) {
  auto& shared = members.group.block(0).succession;
  auto unchanged_since = Clock::now();
  for (Outlook last;;) {
    Outlook sees = look_around(engine, members, without);
    if (sees != last) unchanged_since = Clock::now();
    last = sees;
    sees.impatient = Clock::now() - unchanged_since >= patience;
    sees.tired = Clock::now() - unchanged_since >= 2 * patience;
    const auto [what, value] = succeed(sees);
    switch (what) {
      case Succession::Do::Join:
        if (value >> sees.me & 1) return value;
        [[fallthrough]];  // not the case unless the shared words are damaged
      case Succession::Do::List: {
        sync_point("proposing");
        const uint64_t locals = sees.hosts[sees.host];
        uint64_t listed = sees.own.members;  // acq_rel: passes on what all writers had seen
        while ((listed & locals) == 0 &&
               !shared.members.compare_exchange_weak(listed, listed | value, std::memory_order_acq_rel))
          continue;
        sync_point("proposed");
        continue;
      }
      case Succession::Do::State: {
        sync_point("stating");
        uint64_t word = sees.own.word;
        shared.word.compare_exchange_strong(word, value, std::memory_order_acq_rel);  // acq_rel: as above
        sync_point("stated");
        continue;
      }
      case Succession::Do::Fenced:
        throw Error(ErrorKind::Aborted, rank_names(members.global_ranks, value) + " went on without " + members.name() +
                                            ", which had not come to shrink() when they had "
                                            "waited long enough (" +
                                            seconds_text(patience) +
                                            " by its own patience): "
                                            "end this process (under `syncengine run --restart` another one joins)");
      case Succession::Do::Few:
        throw Error(ErrorKind::PeerLost, members.name() + " can't go on: " + rank_names(members.global_ranks, value) +
                                             " can't be reached, but may live and "
                                             "go on, and are at least half of the ranks: end this process");
      case Succession::Do::Look: break;
    }
    if (interrupted) interrupted();
    std::this_thread::sleep_for(kLook);
  }
}

}  // namespace

std::shared_ptr<Communicator> EngineCommunicator::shrink(Duration patience, const std::function<void()>& interrupted,
                                                         uint64_t without) {
  engine_->throw_if_unusable();
  if (members_.interhost && !members_.interhost->interhost().knows_ends())
    throw Error(ErrorKind::InvalidUsage,
                "shrink: the communicator spans several hosts, whose transport (interhost='mpi' or 'torch') does not "
                "tell a rank that died from one that can't be reached: use interhost='tcp', or, if every process is "
                "still there, connect anew by syncengine.init() on all ranks");
  auto& own = members_.group.own().succession;
  if (own.arrived.load(std::memory_order_relaxed) != 0)  // relaxed: its only writer
    throw Error(ErrorKind::InvalidUsage,
                "shrink: the communicator was closed, or has been shrunk before: shrink the one that came of it");
  const uint64_t number = members_.interhost ? members_.interhost->number_of_next() : 0;
  // All pending operations fail here, and on all members that are left, before any of these may go on.
  engine_->locked([&] { membership_.fail(ErrorKind::Aborted, members_.name() + " shrinks the communicator"); });
  auto expected = members_.interhost ? members_.interhost->expect_group() : nullptr;
  const uint64_t offset = engine_->arena()->allocate_group(sizeof(shm::GroupBlock));
  sync_point("arriving");
  own.arrived.store(offset, std::memory_order_release);  // release: all that this rank did before
  try {
    sync_point("arrived");
    const uint64_t members = await_decision(*engine_, members_, patience, interrupted, without);
    const auto offset_of = [&](int member) {
      const auto& succession = members_.group.block(members_.placement.local_index(member)).succession;
      return member == rank() ? offset : succession.arrived.load(std::memory_order_acquire);  // acquire: above
    };
    // Only now may the pools of dead members be discarded: all members that are left have ended their operations, which
    // may have read there.
    for (int member = 0; member < members_.group.size; ++member) {
      const bool dead = engine_->locked([&] { return engine_->locals().is_dead(members_.group.local_ranks[member]); });
      if (dead) members_.group.arenas[member]->discard_pool();
    }
    auto selected = members_.select(*engine_, members, offset_of, number, splits_);
    auto next = std::make_shared<EngineCommunicator>(engine_, std::move(selected), membership_.origin());
    membership_.hand_on_origin();
    return next;
  } catch (const std::exception& error) {
    // Members may already count on this rank, since it has arrived. They are told that it has failed, so that they
    // don't wait for it in vain in the new communicator, or in a shrink() of that.
    auto* block = reinterpret_cast<shm::GroupBlock*>(engine_->arena()->at(offset));
    write_end_record(block->end_record, shm::Standing::Failed, ErrorKind::PeerLost,
                     members_.name() + failure_text(error, "shrink()"));
    block->succession.arrived.store(shm::kNeverComes, std::memory_order_release);  // release: the record
    throw;
  }
}

}  // namespace syncengine
