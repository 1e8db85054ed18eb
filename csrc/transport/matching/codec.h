// Integers and byte strings in a fixed layout: little-endian, whatever the machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace syncengine::matching {

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

// Past the end it gives zeros, and whole() is false from then on.
class Reader {
 public:
  explicit Reader(std::string_view text) : text_(text) {}

  uint8_t u8() { return static_cast<uint8_t>(get(1)); }
  uint16_t u16() { return static_cast<uint16_t>(get(2)); }
  uint32_t u32() { return static_cast<uint32_t>(get(4)); }
  uint64_t u64() { return get(8); }
  std::string bytes(size_t count) {
    if (text_.size() < count) {
      fail();
      return std::string(count, '\0');
    }
    std::string value(text_.substr(0, count));
    text_.remove_prefix(count);
    return value;
  }
  bool is_past_end() const { return !whole_; }
  bool whole() const { return whole_ && text_.empty(); }  // all was read, and nothing more was asked for

 private:
  uint64_t get(size_t bytes) {
    if (text_.size() < bytes) {
      fail();
      return 0;
    }
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= uint64_t{static_cast<unsigned char>(text_[i])} << (8 * i);
    text_.remove_prefix(bytes);
    return value;
  }
  void fail() {
    whole_ = false;
    text_ = {};
  }

  std::string_view text_;
  bool whole_ = true;
};

}  // namespace syncengine::matching
