// How many file descriptors this process may still open: where connections would not fit, that is said before ranks
// wait in vain.
#pragma once

#include <cstddef>
#include <string>

namespace syncengine::tcp {

// Throws InvalidUsage if fewer than `count` more can be opened. `what` needs them: "63 ranks of other hosts (...)".
void require_descriptors(size_t count, const std::string& what);

// Throws InvalidUsage: the process, or the machine (ENFILE), has none left.
[[noreturn]] void throw_out_of_descriptors(const std::string& text, int code);

}  // namespace syncengine::tcp
