// How many file descriptors this process may still open.
//
// Thread-safety: any thread.
#pragma once

#include <cstddef>
#include <string>

namespace syncengine {

size_t open_descriptors();  // of this process; 0 where it can't be known
size_t most_descriptors();  // ulimit -n

// Throws InvalidUsage, naming `who`, the limit and the one to set, if `count` more don't fit below `ulimit -n`. What
// can't be known (no /proc) is taken to fit.
void require_descriptors(const std::string& who, size_t count);

// The error of a call that wanted a descriptor or sent one: as throw_system_error, and with what to do if there are too
// many.
[[noreturn]] void throw_descriptor_error(const std::string& what, int error);

}  // namespace syncengine
