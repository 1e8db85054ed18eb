// Which ranks share memory: those of one kernel and one network namespace, unless the user splits the machine.
//
// Thread-safety: any thread. Failure: InvalidUsage if the system does not provide this.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/descriptors.h"

namespace syncengine {

// Equal on two ranks only if shared memory can be handed over between them: abstract sockets end at the network
// namespace. `host_id` (SYNCENGINE_HOST_ID) makes several hosts out of one; it never joins two. At most kMostHostKey
// bytes.
std::string host_key(const std::string& host_id);
inline constexpr size_t kMostHostKey = 160;
inline constexpr size_t kMostHostId = 64;

// The parts of a key that tell one machine's network, and a machine, from others.
std::string network_of(const std::string& key);
std::string machine_of(const std::string& key);

// By rank: equal numbers for equal keys, counted from 0 in the order of ranks.
std::vector<int> number_hosts(const std::vector<std::string>& keys);

// Distinguishes a peer's death from its giving up, on the same machine.
//
// Thread-safety: any thread. Failure: what can't be known (another process namespace) is not reported.

// This process, for other processes: "<namespace>-<pid>".
std::string process_id();

// Another process, which is seen to end, in whatever way. One thread at a time.
class ProcessWatch {
 public:
  explicit ProcessWatch(const std::string& process);  // as process_id() is there
  bool sees() const { return ended_ || handle_; }     // false: it is somewhere else, or the kernel refuses
  bool has_ended();
  int fd() const { return handle_.get(); }  // readable once it has ended

 private:
  UniqueFd handle_;
  bool ended_ = false;
};

// Those of `processes` (by rank) that have ended. Waits a moment for the first one: a dying process breaks its
// connections before it is seen as dead.
std::set<int> ended(const std::map<int, std::string>& processes);

}  // namespace syncengine
