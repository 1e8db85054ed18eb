// From one backward to the next: how the last one has ended on this rank, as far as the peers have told on theirs, and
// what they are still to hear about it.
//
// Ownership: the model's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// but for check(), and await_peers() releases it while it waits. Failure: as each says, or the communicator's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/progress/work.h"
#include "reducer/backward/reasons.h"
#include "reducer/buckets/averaging.h"
#include "reducer/buckets/bucket.h"
#include "reducer/parameters/parameters.h"

namespace syncengine {

class Backward;

// What is left of a backward that was abandoned: operations, and what peers have said in them.
struct Abandoned {
  std::vector<std::shared_ptr<Work>> works;
  std::vector<std::shared_ptr<BucketMemory>> buckets;

  // Of this rank, too. To be asked when all works have ended.
  Masks masks() const;
};

class Outcome {
 public:
  Outcome(const Averaging& averaging, const Parameters& parameters) : averaging_(averaging), parameters_(parameters) {}

  // Of the last backward, or forward, that was given up; empty if there was none.
  std::string last_error;
  bool lost = false;  // so was the last one
  // Why .grad does not hold the averages of the last backward; empty if it does. Of one under no_sync, too, if
  // `watches_local_backwards`: whoever asks is to set it before.
  std::string not_averaged;
  bool watches_local_backwards = false;
  bool brought_nothing = false;  // it came from our outputs, and ended without any gradient

  // Whether anything can come of this model; check_usable() throws InvalidUsage and says why not.
  bool is_usable() const { return !unusable_; }
  void check_usable() const;

  // A backward begins. Returns whether this rank has lost the last one in a way of which the others can't know yet: its
  // averages, or by an error when all its buckets were on their way.
  bool begin() {
    ++begun_;
    return std::exchange(has_dropped_, false);
  }

  // It was given up on this rank, for this reason; or has failed at its end.
  void give_up(const Reason& reason);
  void lose(const std::string& text);
  // Tells the peers in a way in which they can go on. Returns false where that can't be.
  bool abandon(Backward& backward, const Reason& reason, bool keeps_gradients);
  // The communicator has ended, or is about to: nobody waits for a word any more.
  void forget_peers() { given_up_.reset(); }
  // Why, if the peers may still be in it.
  const Reason* given_up() const { return given_up_ ? &given_up_->reason : nullptr; }
  // Blocks until they are not: its slots are free for another backward when every rank has taken part. Throws Aborted
  // if nothing can come of the model on some rank.
  void await_peers(std::unique_lock<std::mutex>& lock);

  // A backward's buckets have ended. Throws Aborted if some rank has abandoned it, or dropped the averages of the last
  // one.
  void check(Backward& backward, std::mutex& mutex);
  // All its averages are there. `backward`: its number.
  void end_well(uint64_t backward);
  bool has_ended_well(uint64_t backward) const { return backward == ended_well_; }
  // This rank's code has failed then. The next backward tells, if its route `outlives_errors`.
  void drop(bool outlives_errors);

 private:
  uint64_t everybody() const { return ~uint64_t{0} >> (64 - averaging_.communicator->size()); }
  // Ends the communicator if some ranks have, and others have not.
  void check_dropped(uint64_t dropped_by) const;
  // About the backward with this number, of those begun.
  Reasons exchange(uint64_t backward, const std::optional<Reason>& own) const {
    return {averaging_, parameters_.model(), backward, own};
  }

  const Averaging& averaging_;
  const Parameters& parameters_;
  std::optional<std::string> unusable_;  // why
  uint64_t begun_ = 0;                   // backwards, so far; as many on all ranks
  uint64_t ended_well_ = 0;              // the last that did
  bool has_dropped_ = false;             // see begin()

  struct GivenUp {
    Abandoned left;
    Reason reason;
    Reasons reasons;
  };
  std::optional<GivenUp> given_up_;
};

}  // namespace syncengine
