// Sizes of memory pages. Whatever is mapped, given back, severed or inherited by a fork is a whole number of pages: of
// 4 KiB on x86; of 4, 16 or 64 KiB on ARM, as Linux was built. All ranks of a host have the same.
//
// Thread-safety: any thread. Failure: check_page_size() throws InvalidUsage.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cstddef>
#include <string>

#include "base/error.h"
#include "base/memory.h"

namespace syncengine::shm {

inline const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

// layout.h aligns parts that are seldom touched to the smallest page, whatever pages this machine has: none of these
// parts is given back or severed on its own.
inline constexpr size_t kSmallestPage = 4096, kLargestPage = 64 << 10;
inline constexpr size_t kHugePage = 2 << 20;  // if the kernel's pages are 4 KiB

inline void check_page_size() {
  if (std::has_single_bit(kPage) && kPage >= kSmallestPage && kPage <= kLargestPage) return;
  throw Error(ErrorKind::InvalidUsage, "this kernel's pages are of " + std::to_string(kPage) +
                                           " bytes, and syncengine shares memory in pages of 4 KiB to 64 KiB: "
                                           "start this machine with a kernel that has such pages");
}

// Asks for huge pages, but only with pages of 4 KiB: with larger ones a huge page has 32 or 512 MiB, which the first
// byte touched would cost.
inline void advise_huge_pages(void* data, size_t bytes) {
  if (kPage == kSmallestPage && bytes >= kHugePage) advise(data, bytes, MADV_HUGEPAGE);
}

}  // namespace syncengine::shm
