#include "transport/matching/frame.h"

#include <array>
#include <cstring>

#include "base/processor.h"

#if SYNCENGINE_X86_64
#include <nmmintrin.h>
#elif SYNCENGINE_AARCH64
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace syncengine::matching {

namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected

// The CRC of each possible byte.
constexpr auto kTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? kPolynomial : 0);
    table[byte] = value;
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
#elif SYNCENGINE_AARCH64
__attribute__((target("+crc"))) uint32_t crc32c_armv8(const std::byte* data, size_t bytes) {
  uint32_t value = 0xffffffff;
  for (; bytes >= 8; bytes -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    value = __crc32cd(value, word);
  }
  for (; bytes > 0; --bytes, ++data) value = __crc32cb(value, static_cast<uint8_t>(*data));
  return ~value;
}
#endif

}  // namespace

uint32_t crc32c_portable(const std::byte* data, size_t bytes) {
  uint32_t value = 0xffffffff;
  for (; bytes > 0; --bytes, ++data) value = value >> 8 ^ kTable[(value ^ static_cast<uint32_t>(*data)) & 255];
  return ~value;
}

uint32_t crc32c(const std::byte* data, size_t bytes) {
#if SYNCENGINE_X86_64
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return crc32c_sse42(data, bytes);
#elif SYNCENGINE_AARCH64
  constexpr unsigned long kCrc32 = 1 << 7;  // HWCAP_CRC32
  static const bool has_instruction = (getauxval(AT_HWCAP) & kCrc32) != 0;
  if (has_instruction) return crc32c_armv8(data, bytes);
#endif
  return crc32c_portable(data, bytes);
}

namespace {

constexpr uint32_t kMagic = 0x636e7973;  // "sync"

// The fields that a frame of a kind may have, besides limits of its payload and of `size`; all other fields are zero.
struct Shape {
  uint32_t most_payload = 0, most_size = 0;
  bool tag = false, handle = false, offset = false, checksum = false;
};

constexpr Shape shape_of(Kind kind) {
  switch (kind) {
    case Kind::Heartbeat: return {};
    case Kind::Goodbye: return {.most_size = 1};
    case Kind::Message: return {.most_payload = Interhost::kMaxMessage, .checksum = true};
    case Kind::Abort:
      return {.most_payload = kMaxAbort, .most_size = static_cast<uint32_t>(kLastErrorKind), .checksum = true};
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

// Returns a header's first word: it marks a frame's beginning and, with checksums, covers `rest`, the words behind it.
uint32_t first_word(std::string_view rest, bool checksum) {
  return checksum ? kMagic ^ crc32c(reinterpret_cast<const std::byte*>(rest.data()), rest.size()) : kMagic;
}

}  // namespace

std::string encode(const Frame& frame, bool checksum) {
  const std::string rest = Writer()
                               .u32(static_cast<uint32_t>(frame.kind))
                               .u32(frame.payload)
                               .u32(frame.checksum)
                               .u64(frame.tag)
                               .u64(frame.handle)
                               .u32(frame.offset)
                               .u32(frame.size)
                               .text();
  return Writer().u32(first_word(rest, checksum)).bytes(rest).text();
}

std::optional<Frame> decode(std::string_view bytes, Channel channel, bool checksum) {
  if (bytes.size() != kFrameBytes) return {};
  Reader reader(bytes);
  uint32_t first = reader.u32(), kind = reader.u32();
  if (first != first_word(bytes.substr(sizeof(first)), checksum) || kind > static_cast<uint32_t>(Kind::Chunk))
    return {};
  Frame frame{.kind = static_cast<Kind>(kind)};
  frame.payload = reader.u32();
  frame.checksum = reader.u32();
  frame.tag = reader.u64();
  frame.handle = reader.u64();
  frame.offset = reader.u32();
  frame.size = reader.u32();
  const Channel own = frame.kind >= Kind::Eager ? Channel::Data : Channel::Control;
  if (!reader.whole() || own != channel || !fields_fit(frame)) return {};
  return frame;
}

}  // namespace syncengine::matching
