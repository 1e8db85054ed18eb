// A group of ranks that run collectives together: the engine's face towards bindings and reducer.
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

// What calls on a closed communicator say.
inline constexpr const char* kClosed = "the communicator is closed: call syncengine.init() again";

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual const std::vector<int>& global_ranks() const = 0;  // of each member, for messages
  virtual const Options& options() const = 0;
  Numerics numerics() const { return options().numerics; }
  Duration timeout() const { return options().timeout; }
  virtual bool spans_hosts() const { return false; }
  virtual uint64_t trace_id() const { return 0; }                                 // in traces: the same on all members
  virtual std::vector<int> hosts() const { return std::vector<int>(size(), 0); }  // of each member, numbered from 0
  // Between hosts: which collectives take which way. For logs; empty on one host.
  virtual std::string describe_links() const { return ""; }

  // Collectives that match by the order of submission. submit() never blocks; run() is submit() and wait() in one,
  // without waking the engine's thread.
  virtual std::shared_ptr<Work> submit(Operation operation) = 0;
  virtual void run(Operation operation, const std::function<void()>& interrupted = {}) = 0;

  // One message to or from another member. Sends end when their memory may be used again, which
  // for large ones is when the receiver has them. Never block.
  virtual std::shared_ptr<Work> send(Message message) = 0;
  virtual std::shared_ptr<Work> receive(Message message) = 0;

  // Collectives that match by slot and step, and may be announced in any order on each rank: gradient buckets.
  // announce() names one of the slots that it shares, from 0, and the step, which all ranks count alike, from 1. Never
  // blocks; all-reduce only.
  virtual std::shared_ptr<Work> announce(std::shared_ptr<const Slots> slots, size_t index, uint64_t step,
                                         Operation operation) = 0;
  // This rank announces nothing more of a step. So the step ends on all ranks: what this rank has not announced fails
  // there with StepRefused and this `text`; what all have announced runs. Where a rank has gone on to a later step,
  // since it had all of this one, the communicator fails with that text. So it does if this rank ends before the step
  // has. Never blocks.
  virtual void refuse(const std::shared_ptr<const Slots>& slots, uint64_t step, const std::string& text) = 0;
  // Each rank calls this once for a step that was refused, when it has refused the step or met StepRefused, and waits
  // for the work before it announces anything of a later one. `how` becomes the maximum over all ranks.
  virtual std::shared_ptr<Work> end_refused(std::shared_ptr<const Slots> slots, uint64_t step,
                                            std::shared_ptr<uint8_t> how) = 0;
  // The first `count` that no member holds any more. Collective, matched by order as submit(): blocks; `describe` is
  // what for, and the same on all ranks. Throws InvalidUsage on all of them if there are none.
  virtual std::shared_ptr<const Slots> reserve_slots(size_t count, const std::function<std::string()>& describe = {},
                                                     const std::function<void()>& interrupted = {}) = 0;

  // Waits until `work` ended, rethrows its error. `interrupted`, if given, is called about every 50 ms and may throw,
  // which aborts the communicator. Work that is past the communicator's timeout, or has not ended after `at_most`,
  // fails with Timeout.
  virtual void wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted = {},
                    std::optional<Duration> at_most = {}) = 0;

  // Fails every pending and later operation here and on all peers, at once. Peers raise `kind` with `text`. Idempotent.
  // What fails or closes the communicator of the whole job does so with all that came of it by split().
  virtual void abort(ErrorKind kind, const std::string& text) = 0;
  virtual void throw_if_failed() const = 0;
  // The same, after a look at the peers: for a rank that waits for something else than this communicator's work.
  virtual void check_peers() { throw_if_failed(); }
  // Of the members on this host, counted among themselves, those whose processes have died.
  virtual std::vector<int> dead() { return {}; }
  // The other members whose processes are known to have ended, in whatever way, by their ranks in the job. Processes of
  // this machine are looked at; of others the transport between hosts knows. May be called once the communicator has
  // failed or was closed.
  virtual std::vector<int> ended() { return {}; }

  // Collective over this communicator. Every rank names the group it will be in (ranks of this communicator, its own
  // among them), or none and gets nullptr. Blocks.
  virtual std::shared_ptr<Communicator> split(const std::vector<int>& ranks,
                                              const std::function<void()>& interrupted = {}) = 0;

  // The members that are left after a failure, in their order, as a new communicator; this one has failed from then on.
  // Collective over those that are left, who need not have noticed the failure. Members that have not come after
  // `patience` are left out. Blocks. Several members may die meanwhile. Throws Aborted on a member that was left out.
  // `without`: bit per member that nobody waits for, whether it lives or not; the same on all that come.
  virtual std::shared_ptr<Communicator> shrink(Duration patience, const std::function<void()>& interrupted = {},
                                               uint64_t without = 0) = 0;

  // Memory that all local peers can read and write in place. Freed by the deleter of the returned pointer, any time.
  virtual std::shared_ptr<void> allocate(size_t bytes) = 0;
  // The same for gradients; never destroyed. Null: they may lie wherever torch puts them.
  virtual shm::Pool* gradient_pool() { return nullptr; }

  // What this rank did so far: operations, bytes by path, sleeps. For tests and tuning.
  virtual std::map<std::string, uint64_t> counters() const = 0;

  // Leaves in good order; peers that still wait for this rank get PeerLost. Idempotent; later calls throw InvalidUsage.
  virtual void close() = 0;
  // Whether this rank has closed it, or the one that it is part of. Of one with a single rank, false.
  virtual bool is_closed() const { return false; }
};

// That of a job or group with one rank: every collective is a copy or nothing, and there are no messages. No thread, no
// arena, no hook. `global_rank`: what errors call the rank.
std::shared_ptr<Communicator> make_solo_communicator(const Options& options, int global_rank);

}  // namespace syncengine
