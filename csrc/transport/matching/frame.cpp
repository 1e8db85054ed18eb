#include "transport/matching/frame.h"

#include "transport/matching/codec.h"

namespace syncengine::matching {

namespace {

constexpr uint32_t kMagic = 0x636e7973;  // "sync"

// What a frame of that kind may hold, the rest being zero.
bool fields_fit(const Frame& frame) {
  Frame plain{.kind = frame.kind};
  switch (frame.kind) {
    case Kind::Heartbeat:
    case Kind::Goodbye: break;
    case Kind::Message:
      plain.payload = frame.payload;
      if (frame.payload > Interhost::kMaxMessage) return false;
      break;
    case Kind::Abort:
      plain.payload = frame.payload;
      plain.size = frame.size;
      if (frame.payload > kMaxAbort || frame.size > static_cast<uint32_t>(ErrorKind::InvalidUsage)) return false;
      break;
    case Kind::Ready:
      plain.tag = frame.tag;
      plain.handle = frame.handle;
      plain.size = frame.size;
      if (frame.handle == 0 || frame.size > Interhost::kMaxTransfer) return false;
      break;
    case Kind::Ask: plain.tag = frame.tag; break;
    case Kind::Withdrawn:
      plain.tag = frame.tag;
      plain.handle = frame.handle;
      plain.size = frame.size;
      if (frame.handle < frame.tag) return false;
      break;
    case Kind::Credit:
      plain.size = frame.size;
      if (frame.size == 0 || frame.size > kEagerWindow) return false;
      break;
    case Kind::Eager:
      plain.payload = frame.payload;
      plain.checksum = frame.checksum;
      plain.tag = frame.tag;
      if (frame.payload > kEagerBytes) return false;
      break;
    case Kind::Chunk:
      plain.payload = frame.payload;
      plain.checksum = frame.checksum;
      plain.handle = frame.handle;
      plain.offset = frame.offset;
      if (frame.handle == 0 || frame.payload > kChunkBytes || frame.offset % kChunkUnit != 0) return false;
      if (frame.offset > Interhost::kMaxTransfer - frame.payload) return false;
      break;
  }
  return frame == plain;
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
