#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <thread>

#include "machine.h"

namespace software {

namespace {
constexpr int kMachine = 8;  // devices
thread_local int current = 0;
std::mutex peers_mutex;
auto& enabled = *new std::set<std::pair<int, int>>;

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}

bool is_device(int device) { return device >= 0 && device < static_cast<int>(visible_devices().size()); }

int driver_version() { return std::stoi(setting("SOFTWARE_CUDA_DRIVER", std::to_string(CUDA_VERSION).c_str())); }
}  // namespace

Peers peers() {
  const std::string value = setting("SOFTWARE_CUDA_PEERS", "allowed");
  if (value == "refused") return Peers::Refused;
  if (value == "lying") return Peers::Lying;
  if (value == "read_only") return Peers::ReadOnly;
  return value == "unshared" ? Peers::Unshared : Peers::Allowed;
}

void dawdle() {
  const int most = std::stoi(setting("SOFTWARE_CUDA_JITTER_US", "0"));
  thread_local std::minstd_rand random(static_cast<unsigned>(std::hash<std::thread::id>{}(std::this_thread::get_id())));
  if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % most));
}

std::vector<int> visible_devices() {
  std::vector<int> devices;
  std::istringstream list(setting("CUDA_VISIBLE_DEVICES", "0"));
  for (std::string item; std::getline(list, item, ',');) {
    const int device = std::stoi(item);
    if (device < 0 || device >= kMachine) break;  // as CUDA: those after an unknown one are hidden
    devices.push_back(device);
  }
  return devices;
}

int current_device() { return current; }

bool reaches(int device, int other) {
  std::lock_guard lock(peers_mutex);
  return device == other || enabled.count({device, other});
}

}  // namespace software

using namespace software;

cudaError_t cudaDriverGetVersion(int* version) {
  *version = driver_version();
  return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  if (driver_version() < CUDART_VERSION) return fail(cudaErrorInsufficientDriver);
  *count = static_cast<int>(visible_devices().size());
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  current = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  std::memset(properties, 0, sizeof(*properties));
  std::strcpy(properties->name, "software");
  for (char& byte : properties->uuid.bytes) byte = static_cast<char>(0x50 + visible_devices()[device]);
  properties->major = 9;
  properties->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  if (flags != 0) return fail(cudaErrorInvalidValue);
  if (!is_device(peer) || peer == current) return fail(cudaErrorInvalidDevice);
  if (peers() == Peers::Refused) return fail(cudaErrorPeerAccessUnsupported);
  std::lock_guard lock(peers_mutex);
  return enabled.insert({current, peer}).second ? cudaSuccess : fail(cudaErrorPeerAccessAlreadyEnabled);
}
