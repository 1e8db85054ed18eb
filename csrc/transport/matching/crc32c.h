// CRC-32C (Castagnoli), as in RFC 3720: by the processor's own instruction where it has one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace syncengine::matching {

uint32_t crc32c(const std::byte* data, size_t bytes);
uint32_t crc32c_portable(const std::byte* data, size_t bytes);  // the same, for any processor

}  // namespace syncengine::matching
