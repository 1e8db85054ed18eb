#include <array>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "kernels/half.h"
#include "kernels/reduce.h"
#include "kernels_arrays.h"
#include "kernels_oracle.h"
#include "test.h"

using namespace syncengine;
using namespace syncengine::testing;
using kernels::Isa;

namespace {

constexpr size_t kVectorAndOne = 9;  // elements of which ARM converts eight at once

// 1 * f for any float32 f, as bits: the product is exact, so what comes out is the conversion of f.
uint16_t convert(Isa isa, DType dtype, uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  const uint16_t one = dtype == DType::Float16 ? 0x3c00 : 0x3f80;
  uint16_t result;
  copy_scaled(dtype, &result, &one, 1, value, isa);
  return result;
}

void check_conversion(DType dtype, uint32_t bits) {
  const HalfFormat format = dtype == DType::Float16 ? kFloat16 : kBFloat16;
  float value;
  std::memcpy(&value, &bits, 4);
  const uint16_t wanted = encode(format, value);
  const auto check = [&](uint16_t got, const char* by) {
    if (got == wanted || (std::isnan(decode(format, got)) && std::isnan(value))) return;
    const std::string from = std::string(by) + ": " + name(dtype) + " of float32 bits " + std::to_string(bits);
    fail(__FILE__, __LINE__, from + " is " + std::to_string(got) + ", not " + std::to_string(wanted));
  };
  for (Isa isa : available_isas())
    check(bits == 0x3f800000 ? wanted : convert(isa, dtype, bits), name(isa));  // scale 1 would be a plain copy
  std::array<float, kVectorAndOne> floats;
  std::array<uint16_t, kVectorAndOne> halves;
  floats.fill(value);
  kernels::narrow(dtype, halves.data(), floats.data(), floats.size());
  for (uint16_t got : halves) check(got, "narrow()");
}

// Every value, every tie between neighbors and what lies next to a tie; with both signs, beyond the largest value too.
TEST(kernels_round_float32_to_every_half) {
  for (DType dtype : {DType::Float16, DType::BFloat16}) {
    const HalfFormat format = dtype == DType::Float16 ? kFloat16 : kBFloat16;
    const int infinity = (2 * format.max_exponent + 1) << format.mantissa_bits;
    for (int half = 0; half < infinity; ++half) {
      const double value = decode(format, half);
      const double above = half + 1 < infinity ? decode(format, half + 1) : 2 * value - decode(format, half - 1);
      for (double exact : {value, (value + above) / 2}) {
        const auto rounded = static_cast<float>(exact);
        uint32_t bits;
        std::memcpy(&bits, &rounded, 4);
        for (uint32_t near : {bits - 1, bits, bits + 1}) {
          check_conversion(dtype, near);
          check_conversion(dtype, near ^ 0x80000000);
        }
      }
    }
  }
}

TEST(kernels_widen_every_half_exactly) {
  using Conversions = kernels::HalfConversions<16>;
  for (uint32_t half = 0; half < 65536; ++half) {
    const Conversions::Words words = {half | half << 16, half, half << 16, 0};
    for (bool is_float16 : {true, false}) {
      const auto pair = is_float16 ? Conversions::from_float16(words) : Conversions::from_bfloat16(words);
      const double wanted = decode(is_float16 ? kFloat16 : kBFloat16, half);
      std::array<uint16_t, kVectorAndOne> halves;
      std::array<float, kVectorAndOne + 4> floats{pair.low[0], pair.high[0], pair.low[1], pair.high[2]};
      halves.fill(static_cast<uint16_t>(half));
      kernels::widen(is_float16 ? DType::Float16 : DType::BFloat16, floats.data() + 4, halves.data(), halves.size());
      for (float got : floats)
        CHECK(std::isnan(wanted) ? std::isnan(got) : got == wanted && std::signbit(got) == std::signbit(wanted));
      CHECK(pair.low[2] == 0 && pair.high[1] == 0);
    }
  }
}

// In one call, whose elements differ: each comes out in its place, infinity too.
TEST(halves_are_widened_exactly_and_narrowed_as_the_kernels_do) {
  for (auto [dtype, format] : {std::pair{DType::Float16, kFloat16}, {DType::BFloat16, kBFloat16}}) {
    std::vector<uint16_t> halves(65537), back(halves.size());
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
    std::vector<float> wide(halves.size());
    kernels::widen(dtype, wide.data(), halves.data(), halves.size());
    kernels::narrow(dtype, back.data(), wide.data(), wide.size());
    for (size_t i = 0; i < halves.size(); ++i) {
      const double value = decode(format, halves[i]);
      if (value != value) {
        CHECK(wide[i] != wide[i]);
        continue;
      }
      CHECK_EQ(static_cast<double>(wide[i]), value);
      CHECK_EQ(back[i], halves[i]);
    }
    for (size_t i = 0; i + 1 < wide.size(); ++i) wide[i] = wide[i] * 1.0003f + wide[i + 1] * 0.001f;  // to be rounded
    kernels::narrow(dtype, back.data(), wide.data(), wide.size());
    for (size_t i = 0; i < wide.size(); ++i)
      if (wide[i] == wide[i]) CHECK_EQ(back[i], encode(format, static_cast<double>(wide[i])));
  }
}

// Every half through each instruction set's own conversions, times factors that take subnormals to normal and back.
TEST(kernels_scale_every_half) {
  Array all(2 * 65536), result(2 * 65536);
  for (uint32_t half = 0; half < 65536; ++half) reinterpret_cast<uint16_t*>(all.data())[half] = half;
  for (DType dtype : {DType::Float16, DType::BFloat16}) {
    for (double scale : {1.0 / 3, 0.5, 1024.0, 1048576.0 / 3, std::ldexp(1.0, -14)}) {
      const auto wanted = expected({.dtype = dtype, .op = ReduceOp::Sum, .scale = scale}, {all.data()}, 65536);
      for (Isa isa : available_isas()) {
        copy_scaled(dtype, result.data(), all.data(), 65536, scale, isa);
        CHECK_EQ(first_difference(dtype, result.data(), wanted.data(), 65536), -1);
      }
    }
  }
}

}  // namespace
