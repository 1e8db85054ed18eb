// How a communicator ends on this rank: by failure, its own or a peer's, or in good order; and what is done about
// memory that peers may still use.
#include <algorithm>
#include <atomic>
#include <thread>

#include "engine/communicator/end_record.h"
#include "engine/communicator/engine_communicator.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

namespace {

constexpr std::chrono::seconds kLastWorks{1};  // see await_last_works()

}  // namespace

void EngineCommunicator::abort(ErrorKind kind, const std::string& text) {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    fail(kind, text);
    if (origin_ == Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->fail(kind, text);
  });
}

void EngineCommunicator::close() {
  if (engine_->arena()->forked()) return;
  await_last_works();
  engine_->locked([&] {
    leave();
    if (origin_ == Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->leave();
  });
  engine_->lock().await_drops();
}

void EngineCommunicator::lose_direct_memory(const Error& cause) {
  for (const ArenaRange& range : traffic_.direct_memory()) {
    if (group_.arena->is_severed(range.offset, range.bytes)) return fail(cause.kind(), cause.what());
  }
}

// A peer that failed has said why before its connection ended.
void EngineCommunicator::fail(ErrorKind kind, const std::string& text) {
  if (interhost_ && kind == ErrorKind::PeerLost && !ended_) interhost_->hear_all();
  Error error(kind, text);
  end(shm::Standing::Failed, error, error);
}

void EngineCommunicator::set_last_words(const std::string& text, std::vector<std::shared_ptr<Work>> works,
                                        std::function<std::optional<bool>()> shared) {
  engine_->locked([&] {
    last_words_ = text;
    last_works_.swap(works);
    last_words_shared_.swap(shared);
  });
}

void EngineCommunicator::settle() {
  std::string text;
  std::function<std::optional<bool>()> shared;
  engine_->locked([&] {
    text = last_words_;
    shared = last_words_shared_;
  });
  const std::optional<bool> agreed = shared ? shared() : std::nullopt;
  if (agreed == false) abort(ErrorKind::Aborted, text);
  throw_if_failed();
  if (agreed) set_last_words("", {}, {});
}

// Peers may be about to take part: they are to hear what this rank has to say, and not that it has left.
void EngineCommunicator::await_last_works() {
  std::vector<std::shared_ptr<Work>> works;
  engine_->locked([&] { works = last_works_; });
  const auto until = Clock::now() + kLastWorks;
  auto ended = [](const auto& work) { return work->ended(); };
  while (!std::all_of(works.begin(), works.end(), ended) && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// A peer in the middle of writing this rank's tensors must be told to stop, and kept from going on.
void EngineCommunicator::leave() {
  Error closed(ErrorKind::InvalidUsage, kClosed);
  if (!last_words_.empty() && traffic_.oldest().item != nullptr) {
    return end(shm::Standing::Failed, Error(ErrorKind::Aborted, last_words_), closed);
  }
  if (traffic_.direct_memory().empty()) return end(shm::Standing::Left, closed, closed);
  Error left(ErrorKind::PeerLost, group_.name(group_.rank) +
                                      " has left (it exited or called syncengine.shutdown()) while its " +
                                      describe(traffic_.oldest().item->operation) + " was pending");
  end(shm::Standing::Failed, left, closed);
}

// The first end counts. Peers hear of it before this rank's own callers do; tensors are cut loose before they are
// touched.
void EngineCommunicator::end(shm::Standing standing, const Error& for_peers, const Error& raised_here) {
  if (ended_) return;
  if (interhost_) interhost_->end(standing, for_peers, traffic_);
  ended_ = true;
  for (int lane = 0; lane < shm::kLanes; ++lane) group_.own().end_record.ended[lane] = traffic_.lane(lane).retired();
  write_end_record(group_.own().end_record, standing, for_peers.kind(), for_peers.what());
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before this rank's program writes to what peers still read
  if (standing == shm::Standing::Failed) engine_->sever_tensors(traffic_.direct_memory(), for_peers);
  auto error = std::make_exception_ptr(raised_here);
  traffic_.end(submissions_.end(error), error);
  group_.bell->ring_all();
  engine_->wake_io_loop();
}

// The own block, once every member is as far; until then some may still read results from it.
void EngineCommunicator::give_back_block() {
  uint64_t everybody = group_.size == 64 ? ~uint64_t{0} : (uint64_t{1} << group_.size) - 1;
  uint64_t me = uint64_t{1} << group_.rank;
  for (int member = 0; member < group_.size; ++member) {
    if (member != group_.rank) group_.block(member).gone.fetch_or(me, std::memory_order_release);  // release: our reads
  }
  auto& gone = group_.own().gone;
  auto unused = [&gone, everybody, me] {
    return (gone.load(std::memory_order_acquire) | me) == everybody;  // acquire: theirs
  };
  for (size_t offset : traffic_.messenger().near().fragments())
    group_.arena->retire_group(offset, MailboxRoute::kFragmentsBytes, unused);
  group_.arena->retire_group(group_.offsets[group_.rank], sizeof(shm::GroupBlock), unused);
}

}  // namespace syncengine
