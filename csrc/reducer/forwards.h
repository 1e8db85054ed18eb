// The synchronized forwards that a backward may come from, and what those that it does come from say about it.
//
// Ownership: graphs hold the forwards. Thread-safety: none.
#pragma once

#include <memory>
#include <vector>

#include "reducer/forward.h"
#include "reducer/parameters.h"

namespace syncengine {

class Forwards {
 public:
  // Keeps `forward` itself if none of its outputs does.
  void expect(const std::shared_ptr<Forward>& forward);

  // In the backward's first graph task: adds to `all` what each says, and, if it `looks_for_unused`, what else the
  // backward reaches. Throws InvalidUsage if two say different weights.
  void tell(Forward& all, const Parameters& parameters, bool looks_for_unused) const;

 private:
  std::vector<std::weak_ptr<Forward>> forwards_;
  std::shared_ptr<Forward> kept_;  // the last of them, if its outputs don't keep it
};

}  // namespace syncengine
