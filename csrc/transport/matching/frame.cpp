
#include "transport/matching/frame.h"

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
namespace syncengine::matching {

namespace {

constexpr uint32_t kMagic = 0x636e7973;  // "sync"

// What a frame of a kind may hold: bytes behind it, and a size; which of the other fields, the rest being zero.
struct Shape {
  uint32_t most_payload = 0, most_size = 0;
  bool tag = false, handle = false, offset = false, checksum = false;
};

constexpr Shape shape_of(Kind kind) {
  switch (kind) {
    case Kind::Heartbeat:
    case Kind::Goodbye: return {};
    case Kind::Message: return {.most_payload = Interhost::kMaxMessage};
    case Kind::Abort: return {.most_payload = kMaxAbort, .most_size = static_cast<uint32_t>(ErrorKind::InvalidUsage)};
    case Kind::Ready: return {.most_size = Interhost::kMaxTransfer, .tag = true, .handle = true};
    case Kind::Ask: return {.tag = true};
    case Kind::Withdrawn: return {.most_size = ~uint32_t{0}, .tag = true, .handle = true};
    case Kind::Credit: return {.most_size = kEagerWindow};
    case Kind::Eager: return {.most_payload = kEagerBytes, .tag = true, .checksum = true};
    case Kind::Chunk: return {.most_payload = kChunkBytes, .handle = true, .offset = true, .checksum = true};
  }
  return {};
}

bool fields_fit(const Frame& frame) {
  const Shape shape = shape_of(frame.kind);
  if (frame.payload > shape.most_payload || frame.size > shape.most_size) return false;
  if ((!shape.tag && frame.tag) || (!shape.handle && frame.handle)) return false;
  if ((!shape.offset && frame.offset) || (!shape.checksum && frame.checksum)) return false;
  switch (frame.kind) {
    case Kind::Ready: return frame.handle != 0;
    case Kind::Withdrawn: return frame.handle >= frame.tag;
    case Kind::Credit: return frame.size != 0;
    case Kind::Chunk:
      return frame.handle != 0 && frame.offset % kChunkUnit == 0 &&
             frame.offset <= Interhost::kMaxTransfer - frame.payload;
    default: return true;
  }
}

Channel channel_of(Kind kind) { return kind >= Kind::Eager ? Channel::Data : Channel::Control; }

}  // namespace

std::string encode(const Frame& frame) {
  return Writer()
      .u32(kMagic)
      .u32(static_cast<uint32_t>(frame.kind))
      .u32(frame.payload)
      .u32(frame.checksum)
      .u64(frame.tag)
      .u64(frame.handle)
      .u32(frame.offset)
      .u32(frame.size)
      .text();
}

std::optional<Frame> decode(std::string_view bytes, Channel channel) {
  Reader reader(bytes);
  uint32_t magic = reader.u32(), kind = reader.u32();
  if (magic != kMagic || kind > static_cast<uint32_t>(Kind::Chunk)) return {};
  Frame frame{.kind = static_cast<Kind>(kind)};
  frame.payload = reader.u32();
  frame.checksum = reader.u32();
  frame.tag = reader.u64();
  frame.handle = reader.u64();
  frame.offset = reader.u32();
  frame.size = reader.u32();
  if (!reader.whole() || channel_of(frame.kind) != channel || !fields_fit(frame)) return {};
  return frame;
}

}  // namespace syncengine::matching
