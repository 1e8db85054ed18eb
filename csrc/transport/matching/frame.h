// The wire format after the handshake: frames, each a header of 40 bytes followed by its payload. Pure functions.
//
// Each frame has one encoding: fields that its kind does not use are zero, and decode() refuses what encode() could not
// have written for that connection. So no number that is out of bounds is used to allocate, look up or index. If the
// ranks have agreed on checksums, a header's first word covers the rest of the header, and another word covers the
// payload.
//
// A small transfer (up to kEagerBytes) is sent at once, as an Eager, while the receiver's credit lasts. A sender
// without credit sends an Ask. Transfers that were asked for, and all larger ones, wait for a Ready, which has the
// handle of the receive; then they come as Chunks, over whichever data connection is free.
//
// A rank that leaves in order sends a Goodbye; one that gives the other up sends an Abort, with the reason in words.
// Then it closes its side of the connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/interhost.h"

namespace syncengine::matching {

// Integers and byte strings in a fixed layout: little-endian, whatever the machine.

class Writer {
 public:
  Writer& u8(uint8_t value) { return put(value, 1); }
  Writer& u16(uint16_t value) { return put(value, 2); }
  Writer& u32(uint32_t value) { return put(value, 4); }
  Writer& u64(uint64_t value) { return put(value, 8); }
  Writer& bytes(std::string_view value) {
    text_ += value;
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  Writer& put(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) text_ += static_cast<char>(value >> (8 * i));
    return *this;
  }

  std::string text_;
};

// Reads what Writer has written. Behind the end it returns zeros, and whole() is false from then on.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  uint8_t u8() { return static_cast<uint8_t>(get(1)); }
  uint16_t u16() { return static_cast<uint16_t>(get(2)); }
  uint32_t u32() { return static_cast<uint32_t>(get(4)); }
  uint64_t u64() { return get(8); }
  std::string bytes(size_t count) {
    std::string value(take(count));
    value.resize(count);
    return value;
  }
  bool whole() const { return whole_ && text_.empty(); }  // all was read, and nothing more was asked for

 private:
  uint64_t get(size_t bytes) {
    const std::string_view text = take(bytes);
    uint64_t value = 0;
    for (size_t i = 0; i < text.size(); ++i) value |= uint64_t{static_cast<unsigned char>(text[i])} << (8 * i);
    return value;
  }
  std::string_view take(size_t count) {
    whole_ &= count <= text_.size();
    if (!whole_) return {};
    const std::string_view text = text_.substr(0, count);
    text_.remove_prefix(count);
    return text;
  }

  std::string_view text_;
  bool whole_ = true;
};

// CRC-32C (Castagnoli), as in RFC 3720: by the processor's own instruction where it has one.

uint32_t crc32c(const std::byte* data, size_t bytes);
uint32_t crc32c_portable(const std::byte* data, size_t bytes);  // for processors without the instruction

inline constexpr size_t kFrameBytes = 40;
inline constexpr uint32_t kChunkBytes = 256 << 10;  // at most
inline constexpr uint32_t kChunkUnit = 64 << 10;  // chunks begin at multiples of it, and end there or with the transfer
inline constexpr uint32_t kEagerBytes = Interhost::kMaxUnasked;
inline constexpr uint32_t kEagerWindow = 1 << 20;  // bytes that a receiver holds for a peer before anybody wants them
inline constexpr uint32_t kMaxAbort = 1 << 10;
inline constexpr uint32_t kEagerCost = 64;  // bytes of that window that each Eager costs beside its payload

constexpr uint32_t window_cost(uint32_t bytes) { return bytes + kEagerCost; }

enum class Kind : uint8_t { Heartbeat, Message, Ready, Ask, Credit, Goodbye, Abort, Withdrawn, Eager, Chunk };

enum class Channel : uint8_t { Control, Data };

struct Frame {
  Kind kind = Kind::Heartbeat;
  uint32_t payload = 0;   // bytes that follow: of a message, or of data
  uint32_t checksum = 0;  // CRC-32C of the payload, if the ranks agreed on checksums
  uint64_t tag = 0;       // Ready, Ask, Eager; Withdrawn: the first
  uint64_t handle = 0;    // Ready, Chunk: names a receive, from 1; Withdrawn: the last tag
  uint32_t offset = 0;    // Chunk: where in the transfer
  // A value whose meaning depends on `kind`. Ready: bytes of the receive. Credit: bytes given back. Abort: the kind of
  // error. Withdrawn: how many Eagers were sent so far. Goodbye: 1 if the process ends.
  uint32_t size = 0;

  bool operator==(const Frame&) const = default;
};

// `checksum` is whether the ranks have agreed on checksums.
std::string encode(const Frame& frame, bool checksum);

// Returns nothing if the kFrameBytes `bytes` are no valid frame on such a connection.
std::optional<Frame> decode(std::string_view bytes, Channel channel, bool checksum);

}  // namespace syncengine::matching
