#include "bootstrap/host.h"

#include <sys/stat.h>

#include <cerrno>
#include <fstream>
#include <map>

#include "base/error.h"

namespace syncengine {

std::string host_key(const std::string& host_id) {
  if (host_id.size() > kMostHostId)
    throw Error(ErrorKind::InvalidUsage,
                "SYNCENGINE_HOST_ID has more than " + std::to_string(kMostHostId) + " bytes: '" + host_id + "'");
  std::string boot;
  if (!std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot))
    throw Error(ErrorKind::InvalidUsage, "can't read /proc/sys/kernel/random/boot_id: is /proc mounted?");
  struct stat network{};
  if (stat("/proc/self/ns/net", &network) != 0) throw_system_error("can't tell the network namespace", errno);
  return boot.substr(0, 64) + "/" + std::to_string(network.st_ino) + "/" + host_id;
}

std::string network_of(const std::string& key) { return key.substr(0, key.find('/', key.find('/') + 1)); }

std::vector<int> number_hosts(const std::vector<std::string>& keys) {
  std::map<std::string, int> numbers;
  std::vector<int> hosts;
  for (const auto& key : keys)
    hosts.push_back(numbers.try_emplace(key, static_cast<int>(numbers.size())).first->second);
  return hosts;
}

}  // namespace syncengine
