#include "bootstrap/host.h"

#include <poll.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"

namespace syncengine {

std::string host_key(const std::string& host_id) {
  if (host_id.size() > kMostHostId)
    throw Error(ErrorKind::InvalidUsage,
                "SYNCENGINE_HOST_ID has more than " + std::to_string(kMostHostId) + " bytes: '" + host_id + "'");
  std::string boot;
  if (!std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot))
    throw Error(ErrorKind::InvalidUsage, "can't read /proc/sys/kernel/random/boot_id: is /proc mounted?");
  struct stat network{};  // stays 0 on a kernel without network namespaces, where all processes have one network
  if (stat("/proc/self/ns/net", &network) != 0 && errno != ENOENT)
    throw_system_error("can't tell the network namespace (/proc/self/ns/net)", errno, "newfstatat");
  return boot.substr(0, 64) + "/" + std::to_string(network.st_ino) + "/" + host_id;
}

std::string network_of(const std::string& key) { return key.substr(0, key.find('/', key.find('/') + 1)); }

std::string machine_of(const std::string& key) { return key.substr(0, key.find('/')); }

std::vector<int> number_hosts(const std::vector<std::string>& keys) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const auto& key : keys)
    hosts.push_back(numbers.try_emplace(key, static_cast<int>(numbers.size())).first->second);
  return hosts;
}

namespace {

constexpr auto kDying = std::chrono::milliseconds(200), kPause = std::chrono::milliseconds(5);

std::string process_namespace() {
  struct stat status{};
  return stat("/proc/self/ns/pid", &status) == 0 ? std::to_string(status.st_ino) : "0";
}

}  // namespace

std::string process_id() { return process_namespace() + "-" + std::to_string(getpid()); }

ProcessWatch::ProcessWatch(const std::string& process) {
  const std::string here = process_namespace() + "-";
  const pid_t pid = process.starts_with(here) ? std::atoi(process.c_str() + here.size()) : 0;
  if (pid <= 0) return;  // it can't be seen from here
  handle_ = UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  ended_ = !handle_ && errno == ESRCH;
}

bool ProcessWatch::has_ended() {
  pollfd one{handle_.get(), POLLIN, 0};
  if (!ended_ && handle_) ended_ = poll(&one, 1, 0) == 1;
  return ended_;
}

std::set<int> ended(const std::map<int, std::string>& processes) {
  std::set<int> found;
  std::map<int, ProcessWatch> watches;
  for (const auto& [rank, process] : processes) watches.try_emplace(rank, process);
  for (const Deadline deadline = Deadline::after(kDying);; std::this_thread::sleep_for(kPause)) {
    for (auto& [rank, watch] : watches)
      if (watch.has_ended()) found.insert(rank);
    if (!found.empty() || deadline.passed()) return found;
  }
}

}  // namespace syncengine
