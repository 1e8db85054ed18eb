// Messages of the only rank of a communicator to itself: a send and a receive of one channel and tag meet in the order
// of the calls.
//
// Ownership: owns what is posted. Thread-safety: any thread. Aliasing: see Message. Failure: a failed one stays failed:
// each later call throws the first error.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "collectives/message.h"
#include "engine/progress/options.h"
#include "engine/progress/work.h"

namespace syncengine {

class SoloMessages {
 public:
  // `rank` in the whole job, for errors.
  SoloMessages(const Options& options, int rank);
  ~SoloMessages();

  // Never blocks. A message that does not fit its counterpart fails everything with Mismatch.
  std::shared_ptr<Work> post(Message message, bool sends);
  // See Communicator.
  void wait(const Work& work, const std::function<void()>& interrupted, std::optional<Duration> at_most);
  // Fails everything if a message is past its deadline; says on stderr which one is late.
  void check_deadline();
  void fail(std::exception_ptr error);  // the first one counts
  void throw_if_failed() const;
  uint64_t messages() const;  // that ended well

 private:
  struct Post {
    Message message;
    bool sends;
    std::shared_ptr<Work> work;
    Clock::time_point since;
  };
  using Posts = std::list<Post>;

  // Under the lock. What they return is dropped without it: a tensor's end may run other code.
  Posts take_all(const std::exception_ptr& error);
  void deliver(const Post& send, const Post& receive);
  std::string what_is_pending() const;

  const Options options_;
  const std::string name_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Posts posts_;  // unmatched
  std::exception_ptr error_;
  Clock::time_point logged_ = {};
  uint64_t messages_ = 0;
};

}  // namespace syncengine
