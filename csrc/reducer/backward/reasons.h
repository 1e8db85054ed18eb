// Why ranks have abandoned a backward: the exchange that follows, in which each of them sends its reason and the others
// wait for it.
//
// Ownership: the operation holds the memory. Thread-safety: any thread. Failure: the communicator's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/progress/work.h"
#include "reducer/buckets/averaging.h"

namespace syncengine {

struct Reason {
  std::string text;
  bool for_good;                        // nothing more can come of this model on that rank
  ErrorKind kind = ErrorKind::Aborted;  // of the other ranks' errors: if not this, InvalidUsage, and for good
};

class Reasons {
 public:
  // Tells `own`, if this rank has one. Every rank that has abandoned a backward does so at once, and every other that
  // has heard of it, or is to learn whether there is any. `backward`: its number, the same on all ranks. Never blocks.
  Reasons(const Averaging& averaging, const std::string& model, uint64_t backward, const std::optional<Reason>& own);

  const std::shared_ptr<Work>& work() const { return work_; }
  // Blocks. The gravest of all: one for good, or else that of the first rank. Its text names the rank. None if no rank
  // has one.
  std::optional<Reason> wait();
  // To be asked when work() has ended: whether every rank has one, or some rank one for good, which is every rank's.
  std::function<bool()> agreement() const;

 private:
  std::shared_ptr<Communicator> communicator_;
  std::shared_ptr<std::vector<char>> texts_;
  std::shared_ptr<Work> work_;
};

}  // namespace syncengine
