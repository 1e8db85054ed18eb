#include "transport/matching/crc32c.h"

#include <array>
#include <cstring>

#include "base/processor.h"

#if SYNCENGINE_X86_64
#include <nmmintrin.h>
#endif

namespace syncengine::matching {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

// table[k][b]: what byte b adds when k more bytes follow it.
constexpr auto kTable = [] {
  std::array<std::array<uint32_t, 256>, 8> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    table[0][byte] = value;
  }
  for (size_t k = 1; k < 8; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      table[k][byte] = table[k - 1][byte] >> 8 ^ table[0][table[k - 1][byte] & 255];
    }
  }
  return table;
}();

#if SYNCENGINE_X86_64
__attribute__((target("sse4.2"))) uint32_t crc32c_sse42(const std::byte* data, size_t bytes) {
  uint64_t value = 0xffffffff;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    value = _mm_crc32_u64(value, word);
  }
  auto rest = static_cast<uint32_t>(value);
  for (; bytes > 0; --bytes, ++data) rest = _mm_crc32_u8(rest, static_cast<uint8_t>(*data));
  return ~rest;
}
#endif

}  // namespace

uint32_t crc32c_portable(const std::byte* data, size_t bytes) {
  uint32_t value = 0xffffffff;
  auto at = [&](size_t i) { return static_cast<uint32_t>(data[i]); };
  for (; bytes >= 8; bytes -= 8, data += 8) {
    value = kTable[7][(value & 255) ^ at(0)] ^ kTable[6][(value >> 8 & 255) ^ at(1)] ^
            kTable[5][(value >> 16 & 255) ^ at(2)] ^ kTable[4][value >> 24 ^ at(3)] ^ kTable[3][at(4)] ^
            kTable[2][at(5)] ^ kTable[1][at(6)] ^ kTable[0][at(7)];
  }
  for (; bytes > 0; --bytes, ++data) value = value >> 8 ^ kTable[0][(value & 255) ^ at(0)];
  return ~value;
}

uint32_t crc32c(const std::byte* data, size_t bytes) {
#if SYNCENGINE_X86_64
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_sse42(data, bytes);
#endif
  return crc32c_portable(data, bytes);
}

}  // namespace syncengine::matching
