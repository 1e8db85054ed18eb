#include "engine/hosts/network.h"

#include <pthread.h>
#include <signal.h>

#include "engine/hosts/message.h"

namespace syncengine::hosts {

Network::Network(std::shared_ptr<Engine> engine, std::unique_ptr<Interhost> interhost)
    : engine_(std::move(engine)), interhost_(std::move(interhost)) {
  engine_->expect_io_thread();
  engine_->add(this);
  thread_ = std::thread([this] {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals belong to the program's own threads
    pthread_setname_np(pthread_self(), "syncengine-io");
    interhost_->run([this] {
      // What ended is stored, then it is seen whether anybody sleeps: the mirror image of Bell::listen().
      std::atomic_thread_fence(std::memory_order_seq_cst);
      engine_->carry_on();
    });
  });
}

Network::~Network() {
  if (engine_->arena()->forked()) {
    thread_.detach();  // it runs in the parent only, and so do the connections
    (void)interhost_.release();
    return;
  }
  interhost_->stop();
  thread_.join();
  engine_->remove(this);
}

void Network::enroll(uint32_t group, Listener* listener) {
  if (group >= uint32_t{1} << kGroupBits)
    throw Error(ErrorKind::InvalidUsage, "too many communicators over several hosts: keep those that you need again");
  next_group_ = group + 1;
  listeners_[group] = listener;
  auto early = early_.extract(group);
  if (!early) return;
  for (const auto& message : early.mapped()) listener->hear(message.peer, message.bytes);
}

void Network::forget(uint32_t group) { listeners_.erase(group); }

void Network::hear_all() {
  while (auto message = interhost_->hear()) {
    heard_ = true;
    try {
      deliver(std::move(*message));
    } catch (const Error& error) {
      auto listeners = listeners_;
      for (auto [group, listener] : listeners) listener->give_up(error);
    }
  }
}

void Network::deliver(Interhost::Message message) {
  Head head;
  if (message.bytes.size() < sizeof(head)) throw Error(ErrorKind::PeerLost, "a peer sent a message of a wrong size");
  std::memcpy(&head, message.bytes.data(), sizeof(head));
  if (auto found = listeners_.find(head.group); found != listeners_.end())
    found->second->hear(message.peer, message.bytes);
  else if (head.group >= next_group_)
    early_[head.group].push_back(std::move(message));
}

bool Network::advance() {
  heard_ = false;
  hear_all();
  return heard_;
}

void Network::withdraw(uint32_t group, const Error& error) {
  uint64_t first = uint64_t{group} << kGroupShift;
  interhost_->withdraw(first, first | ((uint64_t{1} << kGroupShift) - 1), error);
}

}  // namespace syncengine::hosts
