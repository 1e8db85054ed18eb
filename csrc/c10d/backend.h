// The torch.distributed backend "syncengine": translates c10d's calls into the engine's.
//
// Ownership: c10::intrusive_ptr, as c10d has it; shares the communicator with its works. Thread-safety: as
// Communicator. Calls without asyncOp wait here and return no work; on CUDA tensors streams wait, not the host.
// Failure: throws the engine's Error, which becomes the class of that name in syncengine.errors. A group in
// which a collective has failed stays failed. Calls are made without the GIL.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>
#include <vector>

#include "c10d/call.h"
#include "c10d/torch_work.h"
#include "engine/communicator/communicator.h"

namespace syncengine {

// The calls that each thread has coalesced so far: between its startCoalescing() and its endCoalescing().
//
// Ownership: the backend's. Thread-safety: any thread; no lock while nobody coalesces. Failure: none.

class Coalescing {
 public:
  // Takes this thread's coalesced calls out of this object; null if there are none. A call that joins them takes them
  // first, and gives them back unless it throws: torch does not call endCoalescing() after an exception.
  std::unique_ptr<Coalesced> take() {
    if (!any_.load(std::memory_order_acquire)) return nullptr;  // a thread always sees its own stores
    std::lock_guard lock(mutex_);
    auto found = open_.extract(this_thread());
    any_.store(!open_.empty(), std::memory_order_release);
    return found ? std::move(found.mapped()) : nullptr;
  }

  // Keeps the coalesced calls of this thread until take(), and drops any that were kept for it before.
  void give(std::unique_ptr<Coalesced> calls) {
    std::lock_guard lock(mutex_);
    std::swap(open_[this_thread()], calls);
    any_.store(true, std::memory_order_release);
  }

 private:
  // Returns a number of this thread that no other thread ever gets. The operating system uses thread ids again, but a
  // new thread must not find the calls of one that has ended.
  static uint64_t this_thread() {
    static std::atomic<uint64_t> threads{0};
    static thread_local const uint64_t number = threads.fetch_add(1, std::memory_order_relaxed);
    return number;
  }

  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Coalesced>> open_;
};

// Whether `input` already lies where an all-gather puts it, at the given element of the output: then nothing is copied.
bool is_in_place(const at::Tensor& output, int64_t elements, const at::Tensor& input);

// Checks of a call's arguments, which throw InvalidUsage that names the call.

inline const at::Tensor& require_only(const std::vector<at::Tensor>& tensors, const char* call) {
  if (tensors.size() != 1) refuse(call, "takes one tensor a rank, got ", tensors.size());
  return tensors[0];
}

inline void require_some(const char* call, const std::vector<at::Tensor>& tensors) {
  if (tensors.empty()) refuse(call, "got an empty list: give at least one tensor, or make no call");
}

inline void require_lists(const char* call, size_t tensors, int wanted) {
  if (tensors == static_cast<size_t>(wanted)) return;
  refuse(call, "got a list of ", tensors, " where one of ", wanted, " is needed");
}

inline void require_same_dtype(const char* call, const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() == b.scalar_type()) return;
  refuse(call, "input and output differ in dtype, ", c10::toString(b.scalar_type()), " and ",
         c10::toString(a.scalar_type()));
}

// `whole` must have `times` as many elements as `part`, and the same dtype.
inline void require_parts(const char* call, const at::Tensor& whole, const at::Tensor& part, int times) {
  require_same_dtype(call, whole, part);
  if (whole.numel() == part.numel() * times) return;
  refuse(call, "the larger tensor has ", whole.numel(), " elements; it needs ", times, " times ", part.numel());
}

class TorchBackend final : public ::c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  using OpType = ::c10d::OpType;

  explicit TorchBackend(std::shared_ptr<Communicator> communicator);
  ~TorchBackend() override;

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }
  Numerics numerics() const { return communicator_->numerics(); }

  // The communicators below all backends of this process that have not been shut down.
  static std::vector<std::shared_ptr<Communicator>> open_communicators();
  // Closes the communicators of all open backends, and ends the backends' threads. Runs before the interpreter ends,
  // since callbacks of futures may be Python's. Called without the GIL.
  static void end_all();

  const std::string getBackendName() const override { return "syncengine"; }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(*options_);  // a copy, since splitGroup() changes what it gets
  }
  void setTimeout(std::chrono::milliseconds timeout) override;

  // Collectives that consist of the engine's operations: collectives.cpp.
  TorchWorkPtr broadcast(Tensors& tensors, const ::c10d::BroadcastOptions& options) override;
  TorchWorkPtr allreduce(Tensors& tensors, const ::c10d::AllreduceOptions& options) override;
  TorchWorkPtr allreduce_coalesced(Tensors& tensors, const ::c10d::AllreduceCoalescedOptions& options) override;
  TorchWorkPtr reduce(Tensors& tensors, const ::c10d::ReduceOptions& options) override;
  TorchWorkPtr allgather(TensorLists& outputs, Tensors& inputs, const ::c10d::AllgatherOptions& options) override;
  TorchWorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                               const ::c10d::AllgatherOptions& options) override {
    return gather_into({output}, {input}, OpType::_ALLGATHER_BASE, options);
  }
  TorchWorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                   const ::c10d::AllgatherOptions& options) override;
  TorchWorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                               const ::c10d::AllgatherOptions& options) override {
    return gather_into(outputs, inputs, OpType::COALESCED, options);
  }
  TorchWorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                              const ::c10d::ReduceScatterOptions& options) override;
  TorchWorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                    const ::c10d::ReduceScatterOptions& options) override {
    return scatter_into({output}, {input}, OpType::_REDUCE_SCATTER_BASE, options);
  }
  TorchWorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                               const ::c10d::ReduceScatterOptions& options) override {
    return scatter_into(outputs, inputs, OpType::COALESCED, options);
  }
  TorchWorkPtr barrier(const ::c10d::BarrierOptions& options) override {
    return meet("barrier", {}, options.timeout, options.asyncOp);
  }

  // Calls that consist of messages: exchanges.cpp.
  TorchWorkPtr send(Tensors& tensors, int destination, int tag) override {
    return message("send", OpType::SEND, tensors, destination, tag);
  }
  TorchWorkPtr recv(Tensors& tensors, int source, int tag) override {
    return message("recv", OpType::RECV, tensors, source, tag);
  }
  TorchWorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return message("recvAnySource", OpType::RECVANYSOURCE, tensors, Message::kAnySource, tag);
  }
  TorchWorkPtr gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) override;
  TorchWorkPtr scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& options) override;
  TorchWorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                             std::vector<int64_t>& input_sizes, const ::c10d::AllToAllOptions& options) override;
  TorchWorkPtr alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options) override;

  // Other calls: backend.cpp, coalescing.cpp.
  void monitoredBarrier(const ::c10d::BarrierOptions& options, bool wait_all_ranks) override;
  bool supportsSplitting() const override { return true; }
  // Makes a group of `ranks`, taken in ascending order; returns null on ranks that are not among them. All ranks of
  // this group must call it. The store is not used.
  c10::intrusive_ptr<::c10d::Backend> split(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const std::vector<int>& ranks,
                                            const c10::intrusive_ptr<Options>& options) override;
  // Refuses to merge groups; the error says what to do instead.
  c10::intrusive_ptr<::c10d::Backend> merge(const c10::intrusive_ptr<::c10d::Store>& store,
                                            const c10::intrusive_ptr<Options>& options, const int& rank,
                                            const int& size) override;
  bool supportsShrinking() const override { return true; }
  // Makes a group without the ranks in `excluded`, which may be dead. All other ranks must call it. From then on this
  // group has failed, whatever the flags say. Needs no store. Throws PeerLost if more ranks have died, or have not
  // called it within the timeout; if it is called again with those excluded, too, it succeeds.
  c10::intrusive_ptr<::c10d::Backend> shrink(const std::vector<int64_t>& excluded, int flags,
                                             const c10::intrusive_ptr<Options>& options) override;
  // Torch asks this before it coalesces a batch of messages, and leaves the batch open if one of them raises. Messages
  // need no coalescing, so the answer is no.
  bool supportsCoalescing() const override { return false; }
  void startCoalescing() override;
  TorchWorkPtr endCoalescing() override;
  void setSequenceNumberForGroup() override {}  // nothing to do: every rank counts from 0
  uint64_t getSequenceNumberForGroup() override { return sequence_.load(std::memory_order_relaxed); }
  void abort() override;
  void shutdown() override;

 private:
  // Says when a call is counted in the sequence number, which must be the same on all ranks. Only calls that are
  // counted AtStart take CUDA tensors: all collectives but gather, scatter and all-to-all.
  enum class Counted {
    Never,    // for the program's own messages
    AtStart,  // not if it is refused: the engine matches calls that start, so a rank may repeat it
    AtOnce,   // even if it is refused: messages sent in it must not match the next call's
  };
  struct How {
    OpType type;
    std::chrono::milliseconds timeout;
    bool async;
    Tensors results = {};
  };
  // begin() makes the Call of a collective or message, checks `inputs` and shows them to profilers; start() starts it.
  Call begin(const char* name, at::ArrayRef<at::Tensor> inputs, Counted counted = Counted::AtStart);
  TorchWorkPtr start(Call call, How how);
  std::unique_ptr<Coalesced> take_coalesced();
  TorchWorkPtr start_on_device(Call call, const How& how);
  std::optional<Duration> at_most(std::chrono::milliseconds timeout) const;
  void require_timeout(std::chrono::milliseconds timeout) const;
  int require_rank(int64_t rank, const char* call) const;
  static at::ArrayRef<at::Tensor> first_of(const TensorLists& lists) {
    return lists.empty() ? at::ArrayRef<at::Tensor>() : lists[0];
  }
  TorchWorkPtr gather_into(const Tensors& outputs, const Tensors& inputs, OpType type,
                           const ::c10d::AllgatherOptions& options);
  TorchWorkPtr scatter_into(const Tensors& outputs, const Tensors& inputs, OpType type,
                            const ::c10d::ReduceScatterOptions& options);
  TorchWorkPtr meet(const char* name, std::function<std::string()> describe, std::chrono::milliseconds timeout,
                    bool async);
  TorchWorkPtr message(const char* name, OpType type, const Tensors& tensors, int peer, int tag);

  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<Communicator> left_;  // of the ranks that are left, once shrink() has been called
  std::shared_ptr<Completer> collectives_ = std::make_shared<Completer>(Completer::Order::AsAdded);
  std::shared_ptr<Completer> messages_ = std::make_shared<Completer>(Completer::Order::AsEnded);
  c10::intrusive_ptr<Options> options_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<uint64_t> sequence_{0};
  Coalescing coalescing_;
};

}  // namespace syncengine
