#include "engine/hosts/network.h"

#include <utility>

#include "base/checked.h"
#include "base/thread.h"
#include "engine/hosts/interhost_members.h"

namespace syncengine::hosts {

Network::Network(std::shared_ptr<Engine> engine, std::unique_ptr<Interhost> interhost)
    : engine_(std::move(engine)), interhost_(std::move(interhost)) {
  expected_.insert(0);  // the job's own communicator is expected
  engine_->expect_io_thread();
  engine_->locked([this] { engine_->progressables().add(this); });
  try {
    thread_ = start_thread(&Network::thread_main, this);
  } catch (...) {
    engine_->locked([this] { engine_->progressables().remove(this); });
    throw;
  }
}

void Network::thread_main() {
  begin_thread("syncengine-io");
  auto progressed = [this] {
    // The ends of transfers are stored first, and then it is checked whether any thread sleeps. A thread that goes to
    // sleep does both in the opposite order, in Bell::listen(), so one side sees the other.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    engine_->progress();
  };
  if (!interhost_->has_steps()) return interhost_->run(progressed);
  for (auto last = Interhost::Step::Quiet; last != Interhost::Step::Over;) {
    driver_.await_turn();  // true at once after stop()
    {
      std::lock_guard lock(moving_);
      last = interhost_->step(std::chrono::hours(1));
    }
    if (last != Interhost::Step::Quiet) progressed();
  }
}

bool Network::claim() {
  if (!interhost_->has_steps() || !driver_.claim()) return false;
  if (!driver_.is_parked()) interhost_->wake();
  return true;
}

bool Network::poll(Duration at_most) {
  if (!claimers_.owns_lock()) {
    if (at_most > Duration::zero())
      claimers_.lock();
    else if (!claimers_.try_lock())
      return false;
  }
  // The network's own thread may have consumed the wake-up while this call waited for the lock, so `woken_` is checked.
  if (at_most > Duration::zero() && woken_.exchange(false, std::memory_order_seq_cst)) return false;
  Deadline until = Deadline::after(at_most);
  do {
    if (interhost_->step(until.left(at_most)) != Interhost::Step::Quiet) return true;
  } while (!woken_.exchange(false, std::memory_order_seq_cst) && !until.passed());
  return false;
}

void Network::wake() {
  woken_.store(true, std::memory_order_seq_cst);
  interhost_->wake();
}

void Network::release() {
  if (claimers_.owns_lock()) claimers_.unlock();
  driver_.leave();
  if (interhost_->has_unsent()) notify();
}

void Network::notify() {
  if (!driver_.is_driven()) driver_.call();
}

Network::~Network() {
  if (engine_->arena()->forked()) {
    thread_.detach();  // a fork's child has neither the thread nor the connections
    (void)interhost_.release();
    return;
  }
  driver_.stop();
  interhost_->stop();
  thread_.join();
  engine_->locked([this] { engine_->progressables().remove(this); });
}

uint32_t Network::take_number(int rank) {
  if (founded_ + 1 == uint32_t{1} << kCountBits) return kTooMany;
  return (static_cast<uint32_t>(rank) << kCountBits | ++founded_) << kShrinkBits;
}

uint64_t Network::expect() {
  expected_.insert(++expectations_);
  return expectations_;
}

// Drops early messages that nobody will claim: all communicators awaited when they came have been made or given up.
void Network::expect_no_more(uint64_t expected) {
  expected_.erase(expected);
  std::erase_if(early_,
                [&](const auto& item) { return expected_.empty() || item.second.expected < *expected_.begin(); });
}

void Network::enroll(uint32_t group, InterhostMembers* members) {
  members_[group] = members;
  auto early = early_.extract(group);
  if (group == kJobGroup) expect_no_more(0);
  if (!early) return;
  for (const auto& message : early.mapped().messages) members->hear(message.peer, message.bytes);
}

bool Network::hear_all() {
  bool heard = false;
  while (auto message = interhost_->hear()) {
    heard = true;
    try {
      deliver(std::move(*message));
    } catch (const Error& error) {
      auto all = members_;
      for (auto [group, members] : all) members->give_up(error);
    }
  }
  return heard;
}

void Network::deliver(Interhost::Message message) {
  Head head;
  if (message.bytes.size() < sizeof(head)) throw Error(ErrorKind::PeerLost, "a peer sent a message of a wrong size");
  std::memcpy(&head, message.bytes.data(), sizeof(head));
  if (auto found = members_.find(head.group); found != members_.end())
    return found->second->hear(message.peer, message.bytes);
  if (expected_.empty()) return;
  size_t kept = 0;  // bytes of this peer
  for (const auto& [group, early] : early_)
    for (const auto& other : early.messages)
      if (other.peer == message.peer) kept += other.bytes.size() + sizeof(other);
  if (kept > kMostEarly)
    throw Error(ErrorKind::PeerLost,
                std::string("a peer sent too much for a communicator that is only being made") + kDamaged);
  Early& early = early_[head.group];
  early.expected = expectations_;
  early.messages.push_back(std::move(message));
}

void Network::withdraw(uint32_t group, const std::vector<int>& members, const Error& error) {
  uint64_t first = uint64_t{group} << kGroupShift;
  interhost_->withdraw(members, first, first | ((uint64_t{1} << kGroupShift) - 1), error);
}

}  // namespace syncengine::hosts
