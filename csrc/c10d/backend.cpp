#include "c10d/backend.h"

#include "base/texts.h"
#include "c10d/in_flight.h"
#include "cuda/device_group.h"
#include "reducer/torch/python_error.h"
#include "streams/queue.h"
#include "streams/without_gil.h"

namespace syncengine {

namespace {

std::chrono::milliseconds milliseconds_of(Duration duration) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(duration);
}

// The backends that have not been shut down.
struct OpenBackends {
  std::mutex mutex;
  std::vector<TorchBackend*> list;
};
// Never destroyed, since backends may outlive the end of main().
OpenBackends& open() {
  static auto* open = new OpenBackends;
  return *open;
}

}  // namespace

std::vector<std::shared_ptr<Communicator>> TorchBackend::open_communicators() {
  std::lock_guard lock(open().mutex);
  std::vector<std::shared_ptr<Communicator>> communicators;
  for (const TorchBackend* backend : open().list) communicators.push_back(backend->communicator_);
  return communicators;
}

void TorchBackend::end_all() {
  for (const auto& communicator : open_communicators()) {
    close_devices(communicator.get());
    communicator->close();
  }
  std::vector<std::shared_ptr<Completer>> completers;
  {
    std::lock_guard lock(open().mutex);
    for (const TorchBackend* backend : open().list)
      completers.insert(completers.end(), {backend->collectives_, backend->messages_});
  }
  for (const auto& completer : completers) completer->stop();
}

TorchBackend::TorchBackend(std::shared_ptr<Communicator> communicator)
    : ::c10d::Backend(communicator->rank(), communicator->size()),
      communicator_(std::move(communicator)),
      options_(c10::make_intrusive<Options>("syncengine", milliseconds_of(communicator_->timeout()))),
      timeout_ms_(options_->timeout.count()) {
  for (int rank : communicator_->global_ranks()) options_->global_ranks_in_group.push_back(rank);
  std::lock_guard lock(open().mutex);
  open().list.push_back(this);
}

TorchBackend::~TorchBackend() {
  const WithoutGil without_gil;  // the last owner of an engine waits for its thread
  shutdown();
  left_.reset();
  communicator_.reset();
}

void TorchBackend::shutdown() {
  {
    std::lock_guard lock(open().mutex);
    std::erase_if(open().list, [this](const auto* other) { return other->communicator_ == communicator_; });
  }
  const WithoutGil without_gil;  // the completer's thread may wait for the GIL
  close_devices(communicator_.get());
  communicator_->close();
  collectives_->stop();
  messages_->stop();
  InFlight::of_process().deliver_ended();
}

void TorchBackend::abort() {
  std::string who = "rank " + std::to_string(communicator_->global_ranks()[rank_]);
  communicator_->abort(ErrorKind::Aborted, who + " aborted the process group");
}

void TorchBackend::require_timeout(std::chrono::milliseconds timeout) const {
  if (timeout.count() <= 0) throw Error(ErrorKind::InvalidUsage, "a timeout of a process group must be more than 0");
  if (timeout <= milliseconds_of(communicator_->timeout())) return;
  throw Error(ErrorKind::InvalidUsage,
              "the timeout of a syncengine process group can be lowered only, from the one it was made or split with: "
              "give init_process_group or new_group a longer one");
}

c10::intrusive_ptr<::c10d::Backend> TorchBackend::split(const c10::intrusive_ptr<::c10d::Store>&,
                                                        const std::vector<int>& ranks,
                                                        const c10::intrusive_ptr<Options>& options) {
  if (options) require_timeout(options->timeout);
  bool member = std::find(ranks.begin(), ranks.end(), rank_) != ranks.end();
  auto group = communicator_->split(member ? ranks : std::vector<int>{}, raise_pending_signal);
  if (!group) return nullptr;
  auto backend = c10::make_intrusive<TorchBackend>(std::move(group));
  if (options) {
    backend->setTimeout(options->timeout);
    backend->options_->group_name = options->group_name;
  }
  return backend;
}

c10::intrusive_ptr<::c10d::Backend> TorchBackend::shrink(const std::vector<int64_t>& excluded, int,
                                                         const c10::intrusive_ptr<Options>& options) {
  if (options) require_timeout(options->timeout);
  const std::chrono::milliseconds timeout(timeout_ms_.load(std::memory_order_relaxed));
  uint64_t without = 0;
  for (int64_t rank : excluded) without |= uint64_t{1} << require_rank(rank, "shrink");
  if (!left_) left_ = communicator_->shrink(timeout, raise_pending_signal, without);
  std::vector<int> gone;
  const std::vector<int>&all = communicator_->global_ranks(), &left = left_->global_ranks();
  for (int rank = 0; rank < size_; ++rank)
    if (std::find(left.begin(), left.end(), all[rank]) == left.end()) gone.push_back(rank);
  if (!std::equal(gone.begin(), gone.end(), excluded.begin(), excluded.end()))
    throw Error(ErrorKind::PeerLost,
                "shrink_group: more ranks have died than are excluded, or have not come: exclude " + rank_names(gone) +
                    " of the group");
  auto backend = c10::make_intrusive<TorchBackend>(left_);
  backend->setTimeout(options ? options->timeout : timeout);
  if (options) backend->options_->group_name = options->group_name;
  return backend;
}

c10::intrusive_ptr<::c10d::Backend> TorchBackend::merge(const c10::intrusive_ptr<::c10d::Store>&,
                                                        const c10::intrusive_ptr<Options>&, const int&, const int&) {
  throw Error(
      ErrorKind::InvalidUsage,
      "merge_remote_group: a syncengine process group can't be merged with others: make one of all the ranks, by "
      "init_process_group or new_group");
}

void TorchBackend::setTimeout(std::chrono::milliseconds timeout) {
  require_timeout(timeout);
  timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
  options_->timeout = timeout;
}

// Returns the time after which a wait for a call fails the communicator; nothing if the communicator's own timeout,
// which acts without any wait, is as short or shorter.
std::optional<Duration> TorchBackend::at_most(std::chrono::milliseconds timeout) const {
  std::chrono::milliseconds group(timeout_ms_.load(std::memory_order_relaxed));
  if (timeout == ::c10d::kUnsetTimeout || timeout == kNoTimeout) timeout = group;
  if (timeout >= milliseconds_of(communicator_->timeout())) return std::nullopt;
  return timeout;
}

int TorchBackend::require_rank(int64_t rank, const char* call) const {
  if (rank < 0 || rank >= size_) refuse(call, "rank ", rank, " of the group is not in 0..", size_ - 1);
  return static_cast<int>(rank);
}

Call TorchBackend::begin(const char* name, at::ArrayRef<at::Tensor> inputs, Counted counted) {
  Call call(
      name,
      {.cuda = counted == Counted::AtStart && cuda::is_built(),
       .follows_order = counted != Counted::Never,
       .by_messages = counted == Counted::AtOnce,
       .advice = "for other devices give init_process_group a backend for each, as in \"cpu:syncengine,cuda:nccl\""},
      {name, inputs});
  call.number = counted == Counted::AtOnce ? sequence_.fetch_add(1, std::memory_order_relaxed)
                                           : sequence_.load(std::memory_order_relaxed);
  call.to_be_counted = counted == Counted::AtStart;
  call.coalesced = take_coalesced();
  for (const at::Tensor& input : inputs) call.require_dense(input);
  return call;
}

TorchWorkPtr TorchBackend::start(Call call, How how) {
  call.results() = std::move(how.results);
  if (call.coalesced) call.coalesced->call.require_device_of(call);
  if (!call.device().is_cpu()) return start_on_device(std::move(call), how);
  if (call.to_be_counted) call.number = sequence_.fetch_add(1, std::memory_order_relaxed);
  auto limit = at_most(how.timeout);
  if (!how.async && !call.coalesced && !limit && call.operations().size() == 1 && call.mail().empty()) {
    run_call(*communicator_, call);
    return nullptr;
  }
  auto works = submit_call(*communicator_, call);
  TorchWork::CallOrigin origin{communicator_, call.mail().empty() ? collectives_ : messages_, how.type, limit};
  if (auto coalesced = std::move(call.coalesced)) {
    coalesced->works.insert(coalesced->works.end(), works.begin(), works.end());
    coalesced->call.join(call);
    const bool delivers = call.delivers();
    const auto work = TorchWork::in_flight(std::move(origin), std::move(call), std::move(works));
    if (delivers) coalesced->call.afterwards([work] { work->deliver_or_throw(); });
    coalescing_.give(std::move(coalesced));
    return nullptr;
  }
  if (how.async) return TorchWork::in_flight(std::move(origin), std::move(call), std::move(works));
  c10::make_intrusive<TorchWork>(std::move(origin), std::move(call), std::move(works))->wait();
  return nullptr;
}

TorchWorkPtr TorchBackend::start_on_device(Call call, const How& how) {
  const c10::Stream stream = queue_on_device(communicator_, call, how.async || call.coalesced);
  if (call.to_be_counted) call.number = sequence_.fetch_add(1, std::memory_order_relaxed);
  TorchWork::CallOrigin origin{.communicator = communicator_, .type = how.type};
  if (auto coalesced = std::move(call.coalesced)) {
    coalesced->call.join(call);
    finish_on_device(std::move(origin), std::move(call), stream);
    coalescing_.give(std::move(coalesced));
    return nullptr;
  }
  if (how.async) return finish_on_device(std::move(origin), std::move(call), stream);
  call.deliver();
  return nullptr;
}

// `wait_all_ranks` is ignored: the error always names all missing ranks, so there is no need to fail at the first.
void TorchBackend::monitoredBarrier(const ::c10d::BarrierOptions& options, bool) {
  meet("monitored_barrier", [] { return std::string("monitored_barrier()"); }, options.timeout, false);
}

TorchWorkPtr TorchBackend::meet(const char* name, std::function<std::string()> describe,
                                std::chrono::milliseconds timeout, bool async) {
  Call call = begin(name, {});
  // A barrier never joins coalesced calls: it waits here, or returns a work of its own.
  if (call.coalesced) coalescing_.give(std::move(call.coalesced));
  call.add({.collective = Collective::Barrier, .describe = std::move(describe)});
  return start(std::move(call), {::c10d::OpType::BARRIER, timeout, async});
}

}  // namespace syncengine
