#include "base/memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>

#include "base/error.h"

namespace syncengine {

Mapping::Mapping(int fd, size_t bytes) : data_(nullptr, Unmap{bytes}) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED)
    throw_system_error("can't map " + std::to_string(bytes) + " bytes of shared memory", errno, "mmap");
  data_.reset(static_cast<std::byte*>(data));
  advise(data, bytes, MADV_DONTDUMP);
}

void Mapping::Unmap::operator()(std::byte* data) const { munmap(data, bytes); }

bool make_inaccessible(void* address, size_t bytes) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(address, bytes, PROT_NONE, kFlags, -1, 0) == address;
}

bool advise(void* address, size_t bytes, int advice) { return madvise(address, bytes, advice) == 0; }

namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr unsigned kNoExecSeal = 0x8;  // MFD_NOEXEC_SEAL: since Linux 6.3, and demanded where vm.memfd_noexec is 2

}  // namespace

UniqueFd create_sealed_memfd(const char* name, size_t bytes, const char* hint) {
  UniqueFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
  if (!fd && errno == EINVAL) fd = UniqueFd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_system_error("can't create shared memory", errno, "memfd_create");
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0)
    throw_system_error("can't size shared memory to " + std::to_string(bytes) + " bytes" + hint, errno, "ftruncate");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw_system_error("can't seal shared memory", errno, "fcntl");
  return fd;
}

size_t sealed_size(int fd) {
  struct stat status{};
  const int seals = fcntl(fd, F_GET_SEALS);
  const bool sealed = seals >= 0 && (seals & kSeals) == kSeals && fstat(fd, &status) == 0;
  return sealed ? static_cast<size_t>(status.st_size) : 0;
}

}  // namespace syncengine
