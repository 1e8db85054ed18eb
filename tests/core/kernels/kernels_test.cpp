#include <algorithm>
#include <cfenv>
#include <random>
#include <string>
#include <vector>

#include "base/processor.h"
#include "kernels/reduce.h"
#include "kernels_arrays.h"
#include "kernels_oracle.h"
#include "test.h"
#if SYNCENGINE_X86_64
#include <xmmintrin.h>
#endif

using namespace syncengine;
using namespace syncengine::testing;
using kernels::Isa, kernels::Reduction, kernels::Rounding;

namespace {

std::string describe(Isa isa, const Reduction& r, size_t sources, size_t destinations, size_t count) {
  return std::string(name(isa)) + " " + name(r.dtype) + " " + name(r.op) +
         (r.rounding == Rounding::Once ? "" : " every hop") + " scale " + std::to_string(r.scale) + ", " +
         std::to_string(sources) + " sources, " + std::to_string(destinations) + " destinations, count " +
         std::to_string(count);
}

std::vector<const void*> const_pointers(const Arrays& arrays) {
  std::vector<const void*> pointers;
  for (auto& array : arrays) pointers.push_back(array->data());
  return pointers;
}

// Reduces copies of `inputs` on `isa`, into the first `in_place` of them and `outside` other arrays, and checks all.
void check_reduce(Isa isa, const Reduction& reduction, const Arrays& inputs, const std::vector<uint8_t>& wanted,
                  size_t count, size_t in_place, int outside) {
  const size_t bytes = count * element_size(reduction.dtype);
  Arrays arrays = make_arrays(inputs.size() + outside, bytes);
  for (size_t s = 0; s < inputs.size(); ++s) std::copy_n(inputs[s]->data(), bytes, arrays[s]->data());
  std::vector<const void*> sources = const_pointers(arrays);
  std::vector<void*> destinations;
  for (size_t i = 0; i < arrays.size(); ++i)
    if (i < in_place || i >= inputs.size()) destinations.push_back(arrays[i]->data());
  reduce(reduction, sources.data(), inputs.size(), destinations.data(), destinations.size(), count, isa);

  const std::string what = describe(isa, reduction, inputs.size(), destinations.size(), count);
  for (size_t i = 0; i < arrays.size(); ++i) {
    const bool written = i < in_place || i >= inputs.size();
    const uint8_t* right = written ? wanted.data() : inputs[i]->data();
    const long difference = first_difference(reduction.dtype, arrays[i]->data(), right, count);
    if (difference >= 0)
      fail(__FILE__, __LINE__, what + ": array " + std::to_string(i) + ", element " + std::to_string(difference));
    if (!arrays[i]->front_untouched()) fail(__FILE__, __LINE__, what + ": wrote before array " + std::to_string(i));
  }
}

void check_everywhere(const Reduction& reduction, int source_count, size_t count, std::mt19937_64& random) {
  Arrays inputs = make_arrays(source_count, count * element_size(reduction.dtype));
  for (auto& input : inputs) fill(reduction.dtype, *input, random);
  const auto wanted = expected(reduction, const_pointers(inputs), count);
  for (Isa isa : available_isas()) {
    check_reduce(isa, reduction, inputs, wanted, count, source_count, 0);
    check_reduce(isa, reduction, inputs, wanted, count, 1, 0);
    check_reduce(isa, reduction, inputs, wanted, count, 0, 2);
  }
}

// Each supported kind of reduction, unscaled.
template <class Body>
void for_each_kind(Body body) {
  for (DType dtype : kDTypes)
    for (ReduceOp op : kOps) {
      if (!is_supported(dtype, op)) continue;
      body(Reduction{.dtype = dtype, .op = op});
      if (element_size(dtype) == 2 && is_floating(dtype))
        body(Reduction{.dtype = dtype, .op = op, .rounding = Rounding::EveryHop});
    }
}

TEST(kernels_match_the_oracle_for_every_number_of_sources) {
  std::mt19937_64 random(1);
  for_each_kind([&](Reduction reduction) {
    for (int sources = 1; sources <= 8; ++sources) {
      reduction.scale = is_floating(reduction.dtype) ? 1.0 / sources : 1.0;
      check_everywhere(reduction, sources, 301, random);
    }
  });
}

TEST(kernels_add_as_a_tree) {
  std::mt19937_64 random(5);
  const std::vector<std::vector<uint8_t>> trees{{0, 1},
                                                {0, 0, 2},
                                                {0, 1, 1},
                                                {0, 1, 0, 2},
                                                {0, 1, 0, 0, 3},
                                                {0, 0, 1, 2, 0, 2},
                                                {0, 1, 0, 2, 0, 1, 0, 3},
                                                {0, 0, 0, 0, 0, 0, 0, 0, 8}};
  for (DType dtype : kFloatingDTypes) {
    for (const auto& merges : trees) {
      for (size_t count : {size_t{1}, size_t{33}, size_t{301}})
        check_everywhere({.dtype = dtype,
                          .op = ReduceOp::Avg,
                          .rounding = Rounding::EveryHop,
                          .scale = 1.0 / 3,
                          .merges = merges.data()},
                         static_cast<int>(merges.size()), count, random);
    }
  }
}

TEST(kernels_match_the_oracle_for_every_tail) {
  std::mt19937_64 random(2);
  for_each_kind([&](Reduction reduction) {
    for (size_t count :
         {0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95, 96, 127, 128, 129, 255, 256, 319}) {
      check_everywhere(reduction, 2, count, random);
      check_everywhere(reduction, 3, count, random);
    }
  });
}

TEST(kernels_scale_by_any_factor) {
  std::mt19937_64 random(3);
  for (DType dtype : kFloatingDTypes)
    for (double scale : {0.0, -1.0, 1.0 / 3, 1e-3, 1e-30, 1e-300, 7e4, 1e300, double(INFINITY), double(NAN)})
      for (ReduceOp op : kOps) {
        check_everywhere({.dtype = dtype, .op = op, .scale = scale}, 2, 500, random);
        check_everywhere({.dtype = dtype, .op = op, .rounding = Rounding::EveryHop, .scale = scale}, 3, 500, random);
      }
}

// One element's bits: 1.0, or infinity.
void put(DType dtype, Array& array, size_t i, bool finite) {
  const uint64_t bits = dtype == DType::Float16    ? (finite ? 0x3c00 : 0xfc00)
                        : dtype == DType::BFloat16 ? (finite ? 0x3f80 : 0xff80)
                        : dtype == DType::Float32  ? (finite ? 0x3f800000 : 0xff800000)
                                                   : (finite ? 0x3ff0000000000000 : 0xfff0000000000000);
  std::memcpy(array.data() + i * element_size(dtype), &bits, element_size(dtype));
}

TEST(kernels_stop_before_what_is_not_finite) {
  std::mt19937_64 random(6);
  for (DType dtype : kFloatingDTypes) {
    for (auto rounding : {kernels::Rounding::Once, kernels::Rounding::EveryHop}) {
      for (int sources : {1, 2, 3}) {
        for (int round = 0; round < 40; ++round) {
          const size_t count = random() % 400 + 1, bad = random() % (count + 1);  // count: none
          Arrays arrays = make_arrays(sources, count * element_size(dtype));
          for (auto& array : arrays)
            for (size_t i = 0; i < count; ++i) put(dtype, *array, i, true);
          if (bad < count) put(dtype, *arrays[random() % sources], bad, false);
          const Reduction reduction{dtype, ReduceOp::Sum, rounding, 0.5, /*stops_at_nonfinite=*/true};
          const auto wanted = expected(reduction, const_pointers(arrays), count);
          for (Isa isa : available_isas()) {
            Arrays own = make_arrays(sources, count * element_size(dtype));
            for (int s = 0; s < sources; ++s) std::copy_n(arrays[s]->data(), own[s]->bytes(), own[s]->data());
            void* destinations[] = {own[0]->data(), own[sources - 1]->data()};  // in place
            const size_t done = reduce(reduction, const_pointers(own).data(), sources, destinations, 2, count, isa);
            CHECK(done <= bad && bad - done < (bad < count ? kernels::kBlockBytes / element_size(dtype) : 1));
            CHECK_EQ(first_difference(dtype, own[0]->data(), wanted.data(), done), -1);
            const size_t bytes = done * element_size(dtype);
            CHECK(std::equal(own[0]->data() + bytes, own[0]->data() + own[0]->bytes(), arrays[0]->data() + bytes));
          }
        }
      }
    }
  }
}

// Each 16-bit pattern: as it is, where the greatest rounds to infinity, and where twice as much overflows.
TEST(kernels_stop_before_each_half_that_is_not_finite) {
  for (DType dtype : {DType::Float16, DType::BFloat16}) {
    const uint16_t infinity = dtype == DType::Float16 ? 0x7c00 : 0x7f80;
    for (double scale : {1.0, 1.003, 2.0}) {
      for (auto rounding : {kernels::Rounding::Once, kernels::Rounding::EveryHop}) {
        const Reduction reduction{dtype, ReduceOp::Sum, rounding, scale, /*stops_at_nonfinite=*/true};
        for (uint32_t bits = 0; bits < 1 << 16; ++bits) {
          const auto value = static_cast<uint16_t>(bits);
          const void* source = &value;
          uint16_t wanted = 0;
          std::memcpy(&wanted, expected(reduction, {source}, 1).data(), sizeof(wanted));
          const bool finite = (wanted & 0x7fff) < infinity;
          for (Isa isa : available_isas()) {
            uint16_t result = 7;
            void* destination = &result;
            CHECK_EQ(reduce(reduction, &source, 1, &destination, 1, 1, isa), finite ? 1u : 0u);
            CHECK_EQ(result, finite ? wanted : 7);
          }
        }
      }
    }
  }
}

TEST(kernels_copy_scaled_matches_the_oracle) {
  std::mt19937_64 random(5);
  for (DType dtype : kDTypes) {
    for (double scale : {1.0, 0.5, 1.0 / 3}) {
      if (scale != 1.0 && !is_floating(dtype)) continue;
      for (size_t count : {0, 1, 63, 1001}) {
        Arrays arrays = make_arrays(3, count * element_size(dtype));
        fill(dtype, *arrays[0], random);
        const auto wanted = expected({.dtype = dtype, .op = ReduceOp::Max, .scale = scale}, {arrays[0]->data()}, count);
        for (Isa isa : available_isas()) {
          copy_scaled(dtype, arrays[1]->data(), arrays[0]->data(), count, scale, isa);
          CHECK_EQ(first_difference(dtype, arrays[1]->data(), wanted.data(), count), -1);
          std::copy_n(arrays[0]->data(), arrays[0]->bytes(), arrays[2]->data());
          copy_scaled(dtype, arrays[2]->data(), arrays[2]->data(), count, scale, isa);
          CHECK_EQ(first_difference(dtype, arrays[2]->data(), wanted.data(), count), -1);
          CHECK(arrays[1]->front_untouched() && arrays[2]->front_untouched());
        }
      }
    }
  }
}

TEST(kernels_copy_by_one_keeps_every_bit) {
  std::vector<uint32_t> source = {0x7f800001, 0xffc12345, 0x80000000, 1}, copy(4);  // a signaling NaN, a payload
  for (Isa isa : available_isas()) {
    copy_scaled(DType::Float32, copy.data(), source.data(), 4, 1.0, isa);
    CHECK(copy == source);
  }
}

#if SYNCENGINE_X86_64
// Sets the thread's floating-point state for a scope.
class FpStateScope {
 public:
  explicit FpStateScope(unsigned state) : saved_(get()), state_(state) { _mm_setcsr(state); }
  ~FpStateScope() { _mm_setcsr(saved_); }
  bool unchanged() const { return get() == state_; }

 private:
  static unsigned get() { return _mm_getcsr() & ~0x3fu; }  // without the sticky flags
  unsigned saved_, state_;
};
constexpr unsigned kStrangeStates[] = {
    0x9fc0,  // flush to zero, denormals are zero
    0x5f80,  // round upward
    0x0f80,  // trap on inexact results
};
#else
class FpStateScope {
 public:
  explicit FpStateScope(int mode) : mode_(mode) { std::fesetround(mode); }
  ~FpStateScope() { std::fesetround(FE_TONEAREST); }
  bool unchanged() const { return std::fegetround() == mode_; }

 private:
  int mode_;
};
constexpr int kStrangeStates[] = {FE_UPWARD, FE_DOWNWARD};
#endif

TEST(kernels_ignore_the_callers_floating_point_state) {
  std::mt19937_64 random(7);
  for_each_kind([&](Reduction reduction) {
    if (!is_floating(reduction.dtype)) return;
    reduction.scale = 1.0 / 3;
    const size_t count = 400, bytes = count * element_size(reduction.dtype);
    Arrays inputs = make_arrays(3, bytes);
    for (auto& input : inputs) fill(reduction.dtype, *input, random);
    const auto sources = const_pointers(inputs);
    const auto wanted = expected(reduction, sources, count);
    Array result(bytes);
    void* destination = result.data();
    for (Isa isa : available_isas()) {
      for (auto state : kStrangeStates) {
        bool unchanged;
        {
          FpStateScope scope(state);
          reduce(reduction, sources.data(), 3, &destination, 1, count, isa);
          unchanged = scope.unchanged();
        }
        CHECK_EQ(first_difference(reduction.dtype, destination, wanted.data(), count), -1);
        CHECK(unchanged);
      }
    }
  });
}

TEST(kernels_choose_an_instruction_set) {
  CHECK(kernels::is_available(Isa::Scalar));
  CHECK(kernels::choose_isa(nullptr) == kernels::best_isa());
  CHECK(kernels::choose_isa("") == kernels::best_isa());
  CHECK(kernels::active_isa() == kernels::choose_isa(std::getenv("SYNCENGINE_ISA")));
  for (Isa isa : kIsas) {
    if (kernels::is_available(isa)) {
      CHECK(kernels::choose_isa(name(isa)) == isa);
    } else {
      CHECK_THROWS(kernels::choose_isa(name(isa)), ErrorKind::InvalidUsage);
    }
  }
  CHECK_THROWS(kernels::choose_isa("AVX2"), ErrorKind::InvalidUsage);
  CHECK(contains(CHECK_THROWS(kernels::choose_isa("sse9"), ErrorKind::InvalidUsage), "SYNCENGINE_ISA=sse9"));
}

}  // namespace
