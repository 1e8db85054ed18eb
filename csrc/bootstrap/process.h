// Distinguishes a peer's death from its giving up, on the same host.
//
// Thread-safety: any thread. Failure: what can't be known (another process namespace) is not reported.
#pragma once

#include <map>
#include <set>
#include <string>

namespace syncengine {

// This process, for other processes: "<namespace>-<pid>".
std::string process_id();

// Those of `processes` (by rank) that have ended. Waits a moment for the first one: a dying process breaks its
// connections before it is seen as dead.
std::set<int> ended(const std::map<int, std::string>& processes);

}  // namespace syncengine
