#include "kernels/reduce.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/fp_state.h"
#include "kernels/half.h"

namespace syncengine::kernels {

namespace {

using Conversions = HalfConversions<16>;
using Words = Conversions::Words;
using Floats = Conversions::Floats;
constexpr size_t kLanes = sizeof(Words) / sizeof(uint32_t);

// One element a word: the other half of each word stays zero.
Words load_halves(const std::byte* source, size_t count) {
  uint16_t halves[kLanes] = {};
  std::memcpy(halves, source, count * 2);
  Words words{};
  for (size_t lane = 0; lane < kLanes; ++lane) words[lane] = halves[lane];
  return words;
}

void store_halves(std::byte* destination, Words words, size_t count) {
  uint16_t halves[kLanes];
  for (size_t lane = 0; lane < kLanes; ++lane) halves[lane] = static_cast<uint16_t>(words[lane]);
  std::memcpy(destination, halves, count * 2);
}

// Neither is inlined: see fp_state.h.
[[gnu::noinline]] void widen_all(DType dtype, float* destination, const std::byte* source, size_t count) {
  for (size_t i = 0; i < count; i += kLanes) {
    size_t lanes = std::min(count - i, kLanes);
    Words words = load_halves(source + i * 2, lanes);
    auto floats = dtype == DType::BFloat16 ? (Floats)(words << 16) : Conversions::from_float16(words).low;
    std::memcpy(destination + i, &floats, lanes * sizeof(float));
  }
}

[[gnu::noinline]] void narrow_all(DType dtype, std::byte* destination, const float* source, size_t count) {
  for (size_t i = 0; i < count; i += kLanes) {
    size_t lanes = std::min(count - i, kLanes);
    Conversions::Pair pair{};
    std::memcpy(&pair.low, source + i, lanes * sizeof(float));
    store_halves(destination + i * 2,
                 dtype == DType::BFloat16 ? Conversions::to_bfloat16(pair) : Conversions::to_float16(pair), lanes);
  }
}

}  // namespace

void widen(DType dtype, float* destination, const void* source, size_t count) {
  const DefaultFpState state;
  widen_all(dtype, destination, static_cast<const std::byte*>(source), count);
}

void narrow(DType dtype, void* destination, const float* source, size_t count) {
  const DefaultFpState state;
  narrow_all(dtype, static_cast<std::byte*>(destination), source, count);
}

}  // namespace syncengine::kernels
