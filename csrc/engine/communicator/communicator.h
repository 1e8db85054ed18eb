// A group of ranks that run collectives together: the interface of the engine for bindings and reducer.
//
// Ownership: shared_ptr; each communicator keeps the process's engine alive. Thread-safety: every method may be called
// from any thread; collectives of one communicator must be submitted in the same order on all its ranks (announced ones
// need not). Aliasing: see Operation. Failure: a failed communicator stays failed: each later call throws the first
// error. Blocking calls must be made without the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "collectives/operation.h"
#include "engine/lanes/slots.h"
#include "engine/progress/options.h"
#include "engine/progress/work.h"

namespace syncengine {

namespace shm {
class Pool;
}

// The error text of calls on a closed communicator.
inline constexpr const char* kClosed =
    "the communicator is closed: make another (by syncengine.init() or init_process_group), and wrap models again";

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::vector<int>& global_ranks() const = 0;  // of each member, for texts
  virtual const Options& options() const = 0;
  Numerics numerics() const { return options().numerics; }
  Duration timeout() const { return options().timeout; }
  virtual bool spans_hosts() const { return false; }
  virtual uint64_t trace_id() const { return 0; }  // identifies it in traces: the same on all members
  virtual std::vector<int> hosts() const { return std::vector<int>(size(), 0); }  // of each member, numbered from 0
  // Returns a text for logs: which collectives take which way between hosts. Empty on one host.
  virtual std::string describe_links() const { return ""; }

  // Collectives that match by the order of submission. submit() never blocks; run() is submit() and wait() in one,
  // without waking the engine's thread.
  virtual std::shared_ptr<Work> submit(Operation operation) = 0;
  virtual void run(Operation operation, const std::function<void()>& interrupted = {}) = 0;

  // Start to send or receive one message, and never block. A send ends when its memory may be used again: for a large
  // message, not before its receive was posted.
  virtual std::shared_ptr<Work> send(Message message) = 0;
  virtual std::shared_ptr<Work> receive(Message message) = 0;

  // Announces an all-reduce, such as that of a gradient bucket. Ranks match it by slot and step, so each rank may
  // announce its buckets in any order. `index` is the number of the slot in `slots`, from 0; `step` is the number of
  // the step, from 1, which all ranks count alike. Never blocks.
  virtual std::shared_ptr<Work> announce(std::shared_ptr<const Slots> slots, size_t index, uint64_t step,
                                         Operation operation) = 0;
  // Refuses a step for all ranks: this rank announces nothing more of it but its end, by end_refused(). Operations that
  // this rank has not announced fail on the others with StepRefused and this `text`; those that all ranks have
  // announced run. If a rank has all results of the step and has gone on to a later one, or if this rank leaves or dies
  // before the step's end has run, the communicator fails with that text. Never blocks.
  virtual void refuse(const std::shared_ptr<const Slots>& slots, uint64_t step, const std::string& text) = 0;
  // Announces the end of a refused step. Each rank calls this once, when it has refused the step or met StepRefused,
  // and waits for the work before it announces anything of a later step. Each rank's `how` becomes the maximum of all.
  std::shared_ptr<Work> end_refused(std::shared_ptr<const Slots> slots, uint64_t step, std::shared_ptr<uint8_t> how) {
    Operation operation{.dtype = DType::UInt8, .op = ReduceOp::Max, .numerics = numerics()};
    operation.input = operation.output = {how.get(), sizeof(*how)};
    operation.describe = [] { return std::string("the end of a step that a rank has refused"); };
    operation.keepalive = std::move(how);
    const size_t index = slots->end_slot() - slots->first();
    return announce(std::move(slots), index, step, std::move(operation));
  }
  // Reserves the first run of `count` slots that no member holds. Collective, matched by order as submit(): blocks.
  // `describe` says what the slots are for, the same on all ranks. Throws InvalidUsage on all ranks if there is none.
  virtual std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>& describe = {},
                                                     const std::function<void()>& interrupted = {}) = 0;

  // Waits until `work` has ended, and rethrows its error. `interrupted`, if given, is called about every 50 ms and may
  // throw, which aborts the communicator. The communicator fails with Timeout if its oldest work is past its timeout,
  // or if `work` has not ended `at_most` after this call.
  virtual void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted = {},
                    std::optional<Duration> at_most = {}) = 0;

  // Fails every pending and later operation here and on all peers, at once. Peers raise `kind` with `text`. Idempotent.
  // Aborting or closing the communicator of the whole job does the same to all that came of it by split().
  virtual void abort(ErrorKind kind, const std::string& text) = 0;
  virtual void throw_if_failed() const = 0;
  // Checks the peers, then throws if the communicator failed: for ranks that wait for something other than its work.
  virtual void check_peers() { throw_if_failed(); }
  // Returns the members, except this one, whose processes are known to have ended, in whatever way, by their ranks in
  // the job. Processes of this machine are checked; those of other machines are known by the transport between hosts.
  // Works even after the communicator has failed or was closed.
  virtual std::vector<int> ended() { return {}; }

  // Collective over this communicator. Every rank names the group it will be in (ranks of this communicator, including
  // itself), or none and gets nullptr. Blocks.
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& ranks,
                                              const std::function<void()>& interrupted = {}) = 0;

  // Makes a new communicator of the members that are left after a failure, in their order; this one has failed from
  // then on. Collective over those that are left, who need not have noticed the failure. Members that have not come
  // when nothing has changed for `patience` are left out. Blocks. Several members may die meanwhile. Throws Aborted on
  // a member that was left out. `without` has a bit for each member that nobody waits for, whether it lives or not; it
  // is the same on all that come.
  virtual std::shared_ptr<Communicator> shrink(Duration patience, const std::function<void()>& interrupted = {},
                                               uint64_t without = 0) = 0;

  // Allocates memory that all local peers can read and write in place; dropping the pointer frees it, at any time.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  // Returns the pool for gradients, which is never destroyed; null if these may lie wherever torch puts them.
  virtual shm::Pool* gradient_pool() { return nullptr; }

  // Counters of this rank's work so far: operations, bytes by path, sleeps. Used by tests and for tuning.
  virtual std::map<std::string, uint64_t> counters() const = 0;

  // Leaves in good order; peers that still wait for this rank get PeerLost. Idempotent; later calls throw InvalidUsage.
  virtual void close() = 0;
  // Whether this rank has closed this communicator, or the job's, from which it was split. With one rank: always false.
  virtual bool is_closed() const { return false; }
};

// Makes the communicator of a job or group with one rank: every collective is a copy or nothing, and there are no
// messages, no thread, no arena. Errors call the rank `global_rank`.
std::shared_ptr<Communicator> make_solo_communicator(const Options& options, int global_rank);

}  // namespace syncengine
