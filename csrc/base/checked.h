// Checks of words that another process has written, in memory that both map or on the wire, before one becomes an
// index, a length, a count, an enumerator or a pointer here. The writer may be wrong, or changing the word right now.
//
// Each word is loaded once, into a local, so later writes change nothing here. A value is used only as a Checked, which
// only the check can make. A word that is merely compared with others (how far a peer is) needs no check.
//
// Ownership: values. Thread-safety: any thread, while the writer writes. Failure: a check that fails gives nothing.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <type_traits>

namespace syncengine {

// The end of the text of an error about a value out of shared memory, or off the wire, that can't be right.
inline constexpr const char* kDamaged = ": its memory or the network is faulty, or somebody interferes";

template <class T>
class Checked {
 public:
  // Checks an enumerator or an index: gives nothing if `value` is above `most`.
  static std::optional<Checked> at_most(T most, uint64_t value) {
    if (value > static_cast<uint64_t>(most)) return {};
    return Checked(static_cast<T>(value));
  }
  // Checks a struct that has been copied out of shared memory: gives nothing if the copy does not pass `is_sound`.
  template <class IsSound>
  static std::optional<Checked> sound(const T& copy, const IsSound& is_sound) {
    if (!is_sound(copy)) return {};
    return Checked(copy);
  }

  const T& get() const { return value_; }
  const T* operator->() const { return &value_; }

 private:
  explicit Checked(const T& value) : value_(value) {}
  T value_;
};

// Loads a word that is not a std::atomic exactly once, so that the value checked is the value used.
template <class Word>
Word load_once(const Word& word) {
  static_assert(std::is_trivially_copyable_v<Word> && sizeof(Word) <= sizeof(uint64_t));
  Word value;
  __atomic_load(&word, &value, __ATOMIC_RELAXED);
  return value;
}

// Copies a struct word by word, each with one load.
template <class Struct>
Struct copy_once(const Struct& theirs) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % sizeof(uint64_t) == 0);
  using Word [[gnu::may_alias]] = uint64_t;
  std::array<uint64_t, sizeof(Struct) / sizeof(uint64_t)> words;
  auto* from = reinterpret_cast<const Word*>(&theirs);
  for (size_t i = 0; i < words.size(); ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
  return std::bit_cast<Struct>(words);
}

// The text in an array that another process has written, which may lack the terminating zero.
template <size_t kBytes>
std::string checked_text(const char (&theirs)[kBytes]) {
  std::string text(theirs, kBytes);
  text.resize(strnlen(text.data(), kBytes));
  return text;
}

}  // namespace syncengine
