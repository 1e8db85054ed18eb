// Pages of PAGE_SIZE bytes (16384, say), for a program that is started with this library in LD_PRELOAD: sysconf() and
// its kind tell so to everybody, and what the engine maps, gives back or replaces is treated as by a kernel with such
// pages. That refuses addresses and offsets between them (EINVAL), and takes the whole of each page that a length
// begins.
//
// Calls of other libraries, which may know the real size, go on as they are. Not shown: a copy on write is of a real
// page.
#include <dlfcn.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

size_t page() {  // no object: libraries that start before this one ask, too
  static size_t bytes;
  if (bytes == 0) {
    const char* text = std::getenv("PAGE_SIZE");
    bytes = text ? std::strtoul(text, nullptr, 10) : 0;
    if (bytes == 0) std::abort();
  }
  return bytes;
}

size_t rounded(size_t bytes) { return (bytes + page() - 1) / page() * page(); }
bool between_pages(const void* address) { return reinterpret_cast<uintptr_t>(address) % page() != 0; }

bool is_engine(void* caller) {
  Dl_info info;
  if (!dladdr(caller, &info) || !info.dli_fname) return false;
  return std::strstr(info.dli_fname, "syncengine/_C.") || std::strstr(info.dli_fname, "core_tests");
}

template <class... Words>
void* call(long number, Words... words) {
  return reinterpret_cast<void*>(syscall(number, words...));
}

void* refused() {
  errno = EINVAL;
  return MAP_FAILED;
}

void* map(void* caller, void* address, size_t bytes, int protection, int flags, int fd, off_t offset) {
  if (is_engine(caller)) {
    const bool fixed = (flags & MAP_FIXED) != 0;
    if (static_cast<size_t>(offset) % page() != 0 || (fixed && between_pages(address))) return refused();
    bytes = rounded(bytes);
    if (!fixed) {  // where a page begins
      void* room =
          call(SYS_mmap, nullptr, bytes + page(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (room == MAP_FAILED) return room;
      auto* begin = static_cast<char*>(room);
      char* first = begin + (page() - reinterpret_cast<uintptr_t>(begin) % page()) % page();
      if (first > begin) syscall(SYS_munmap, begin, first - begin);
      if (first < begin + page()) syscall(SYS_munmap, first + bytes, begin + page() - first);
      void* mapped = call(SYS_mmap, first, bytes, protection, flags | MAP_FIXED, fd, offset);
      if (mapped == MAP_FAILED) {
        const int code = errno;
        syscall(SYS_munmap, first, bytes);
        errno = code;
      }
      return mapped;
    }
  }
  return call(SYS_mmap, address, bytes, protection, flags, fd, offset);
}

int change(void* caller, long number, void* address, size_t bytes, int how) {
  if (is_engine(caller)) {
    if (between_pages(address)) return errno = EINVAL, -1;
    bytes = rounded(bytes);
  }
  return static_cast<int>(syscall(number, address, bytes, how));
}

}  // namespace

extern "C" {

void* mmap(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  return map(__builtin_return_address(0), address, bytes, protection, flags, fd, offset);
}
void* mmap64(void* address, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  return map(__builtin_return_address(0), address, bytes, protection, flags, fd, offset);
}

void* mremap(void* address, size_t bytes, size_t new_bytes, int flags, ...) noexcept {
  va_list more;
  va_start(more, flags);
  void* place = (flags & MREMAP_FIXED) != 0 ? va_arg(more, void*) : nullptr;
  va_end(more);
  if (is_engine(__builtin_return_address(0))) {
    if (between_pages(address) || between_pages(place)) return refused();
    bytes = rounded(bytes), new_bytes = rounded(new_bytes);
  }
  return call(SYS_mremap, address, bytes, new_bytes, flags, place);
}

int munmap(void* address, size_t bytes) noexcept {
  return change(__builtin_return_address(0), SYS_munmap, address, bytes, 0);
}
int mprotect(void* address, size_t bytes, int protection) noexcept {
  return change(__builtin_return_address(0), SYS_mprotect, address, bytes, protection);
}
int madvise(void* address, size_t bytes, int advice) noexcept {
  return change(__builtin_return_address(0), SYS_madvise, address, bytes, advice);
}

long sysconf(int name) noexcept {
  static auto* next = reinterpret_cast<long (*)(int)>(dlsym(RTLD_NEXT, "sysconf"));
  if (name == _SC_PAGESIZE) return static_cast<long>(page());
  const long value = next(name);
  const bool is_count = name == _SC_PHYS_PAGES || name == _SC_AVPHYS_PAGES;
  return is_count ? value * 4096 / static_cast<long>(page()) : value;
}
int getpagesize() noexcept { return static_cast<int>(page()); }
unsigned long getauxval(unsigned long type) noexcept {
  static auto* next = reinterpret_cast<unsigned long (*)(unsigned long)>(dlsym(RTLD_NEXT, "getauxval"));
  return type == AT_PAGESZ ? page() : next(type);
}
}
