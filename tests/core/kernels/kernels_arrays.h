// What the kernels' tests feed them: arrays between memory that must not change, filled with numbers of every sort.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "kernels/reduce.h"
#include "kernels_oracle.h"

namespace syncengine::testing {

inline constexpr kernels::Isa kIsas[] = {kernels::Isa::Scalar, kernels::Isa::Avx2, kernels::Isa::Avx512,
                                         kernels::Isa::Neon, kernels::Isa::NeonBf16};

inline std::vector<kernels::Isa> available_isas() {
  std::vector<kernels::Isa> isas;
  std::copy_if(std::begin(kIsas), std::end(kIsas), std::back_inserter(isas), kernels::is_available);
  return isas;
}

// An array that ends right before a page that can't be touched, after bytes that must not change. So its address has,
// most of the time, no more than its element's alignment.
class Array {
 public:
  explicit Array(size_t bytes) : bytes_(bytes), page_(sysconf(_SC_PAGESIZE)) {
    front_ = (bytes / page_ + 2) * page_;
    map_ = static_cast<uint8_t*>(
        mmap(nullptr, front_ + page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (map_ == MAP_FAILED || mprotect(map_ + front_, page_, PROT_NONE) != 0) std::abort();
    std::fill(map_, data(), kUntouched);
  }
  Array(const Array&) = delete;
  ~Array() { munmap(map_, front_ + page_); }

  uint8_t* data() const { return map_ + front_ - bytes_; }
  size_t bytes() const { return bytes_; }
  bool front_untouched() const {
    return std::all_of(map_, data(), [](uint8_t byte) { return byte == kUntouched; });
  }

 private:
  static constexpr uint8_t kUntouched = 0xa5;
  size_t bytes_, page_, front_;
  uint8_t* map_;
};

using Arrays = std::vector<std::unique_ptr<Array>>;

inline Arrays make_arrays(int number, size_t bytes) {
  Arrays arrays;
  for (int i = 0; i < number; ++i) arrays.push_back(std::make_unique<Array>(bytes));
  return arrays;
}

template <class T, class Bits>
void fill_floating(Array& array, std::mt19937_64& random) {
  using Limits = std::numeric_limits<T>;
  const T special[] = {T(0),
                       -T(0),
                       Limits::denorm_min(),
                       -Limits::denorm_min(),
                       Limits::min(),
                       Limits::max(),
                       Limits::lowest(),
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       Limits::signaling_NaN()};
  for (size_t i = 0; i < array.bytes() / sizeof(T); ++i) {
    Bits bits = static_cast<Bits>(random());
    const int kind = random() % 4;
    if (kind == 0) std::memcpy(&bits, &special[random() % std::size(special)], sizeof(T));
    if (kind > 1) {  // of ordinary size, so that sums round
      const T value = static_cast<T>(static_cast<int64_t>(random() % 2000001) - 1000000) / T(65537);
      std::memcpy(&bits, &value, sizeof(T));
    }
    std::memcpy(array.data() + i * sizeof(T), &bits, sizeof(T));
  }
}

inline void fill_half(HalfFormat format, Array& array, std::mt19937_64& random) {
  const int infinity = (2 * format.max_exponent + 1) << format.mantissa_bits;
  const int smallest_normal = 1 << format.mantissa_bits;
  const int special[] = {0, 1, 2, smallest_normal - 1, smallest_normal, infinity - 1, infinity, infinity + 1};
  for (size_t i = 0; i < array.bytes() / 2; ++i) {
    auto bits = static_cast<uint16_t>(random());
    const int kind = random() % 4;
    if (kind == 0) bits = special[random() % std::size(special)] | (random() & 0x8000);
    if (kind > 1) bits = encode(format, (static_cast<double>(random() % 200001) - 100000) / 4099);
    std::memcpy(array.data() + 2 * i, &bits, 2);
  }
}

inline void fill(DType dtype, Array& array, std::mt19937_64& random) {
  switch (dtype) {
    case DType::Float16: return fill_half(kFloat16, array, random);
    case DType::BFloat16: return fill_half(kBFloat16, array, random);
    case DType::Float32: return fill_floating<float, uint32_t>(array, random);
    case DType::Float64: return fill_floating<double, uint64_t>(array, random);
    default: break;
  }
  const uint8_t mask = dtype == DType::Bool ? 1 : 0xff;
  std::generate_n(array.data(), array.bytes(), [&] { return static_cast<uint8_t>(random() & mask); });
}

}  // namespace syncengine::testing
