// Whole pages, cache lines, blocks.
#pragma once

#include <cstddef>

namespace syncengine {

inline constexpr size_t kCacheLine = 64;

constexpr size_t round_down(size_t value, size_t multiple) { return value / multiple * multiple; }
constexpr size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace syncengine
