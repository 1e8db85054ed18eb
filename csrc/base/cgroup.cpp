#include "base/cgroup.h"

#include <fstream>
#include <sstream>

namespace syncengine {

namespace {

bool lists(const std::string& options, const std::string& option) {
  return ("," + options + ",").find("," + option + ",") != std::string::npos;
}

// This process's path in the hierarchy of `controller`, or in that of version 2 if this is "".
std::string own_path(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/job/7", "0::/job/7"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : lists(controllers, controller)) return line.substr(second + 1);
  }
  return "/";
}

struct Mount {
  std::string top;    // the cgroup that is mounted there
  std::string place;  // empty: nowhere
};

Mount find_mount(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/mountinfo");
  Mount found;
  for (std::string line; std::getline(file, line);) {  // "35 31 0:32 /top /place rw - cgroup cgroup rw,memory"
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
    std::string id, parent, device, top, place, type, source, options;
    before >> id >> parent >> device >> top >> place;
    after >> type >> source >> options;
    const bool fits = controller.empty() ? type == "cgroup2" : type == "cgroup" && lists(options, controller);
    if (fits && found.place.empty()) found = {top, place};
  }
  return found;
}

std::vector<std::string> folders(const std::string& controller, const std::string& root) {
  const Mount mount = find_mount(controller, root);
  if (mount.place.empty()) return {};
  std::string path = own_path(controller, root);
  // A container may see its own cgroup as the top, and read the host's path to it, or one that leads out of what it
  // sees.
  if (mount.top != "/" && (path + "/").starts_with(mount.top + "/")) path.erase(0, mount.top.size());
  if ((path + "/").find("/../") != std::string::npos) path.clear();
  std::vector<std::string> all;
  for (; path.find_first_not_of('/') != std::string::npos; path.erase(path.rfind('/')))
    all.push_back(root + mount.place + path + "/");
  all.push_back(root + mount.place + "/");
  return all;
}

}  // namespace

CgroupFolders cgroup_folders(const std::string& controller, const std::string& root) {
  return {.v2 = folders("", root), .v1 = folders(controller, root)};
}

}  // namespace syncengine
