// Finds out which ranks share memory: those of one kernel and network namespace, unless the user splits the machine.
//
// Thread-safety: any thread. Failure: InvalidUsage if the system does not provide this.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/descriptors.h"

namespace syncengine {

// A text that is equal on two ranks only if one can hand the other shared memory: abstract sockets end at the network
// namespace. `host_id` (SYNCENGINE_HOST_ID) splits a host into several and never joins two. At most kMostHostKey bytes.
std::string host_key(const std::string& host_id);
inline constexpr size_t kMostHostKey = 160;
inline constexpr size_t kMostHostId = 64;

// Return parts of a host key: network_of() the machine and its network namespace, machine_of() the machine alone.
std::string network_of(const std::string& key);
std::string machine_of(const std::string& key);

// A number for each rank: equal numbers for equal keys, counted from 0 in the order of ranks.
std::vector<int> number_hosts(const std::vector<std::string>& keys);

// Finds out whether a process of this machine has ended, so that a peer's death is told from its giving up.
//
// Thread-safety: any thread. Failure: what can't be known (another process namespace) is not reported.

// Identifies this process to other processes: "<namespace>-<pid>".
std::string process_id();

// Watches another process for its end, however it ends. One thread at a time.
class ProcessWatch {
 public:
  explicit ProcessWatch(const std::string& process);  // what process_id() returned there
  bool sees() const { return ended_ || handle_; }  // false: the process is in another namespace, or the kernel refuses
  bool has_ended();

 private:
  UniqueFd handle_;
  bool ended_ = false;
};

// The ranks whose processes have ended, of `processes` by rank. Waits a moment for the first one: a dying process
// breaks its connections before it can be seen as dead.
std::set<int> ended(const std::map<int, std::string>& processes);

}  // namespace syncengine
