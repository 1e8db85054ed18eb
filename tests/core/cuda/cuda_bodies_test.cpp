// The bodies of the GPU kernels give the bits of the CPU's kernels.
#include <cstring>
#include <random>
#include <vector>

#include "collectives/runner.h"
#include "cuda_twin.h"
#include "kernels/reduce.h"
#include "kernels_oracle.h"

namespace syncengine {

namespace {

using testing::first_difference, testing::run_reduce;

// Random bits: subnormals, infinities and NaN among them. Every second source is near the first, so that sums cancel.
std::vector<uint64_t> random_words(std::mt19937_64& random, size_t count, DType dtype) {
  std::vector<uint64_t> words(count);
  for (auto& word : words) word = dtype == DType::Bool ? random() & 0x0101010101010101 : random();
  return words;
}

void compare(DType dtype, ReduceOp op, kernels::Rounding rounding, int sources, size_t bytes, size_t skew) {
  std::mt19937_64 random(sources * 1000 + bytes);
  const size_t element = element_size(dtype), count = bytes / element;
  std::vector<std::vector<uint64_t>> inputs;
  std::vector<const void*> pointers;
  for (int s = 0; s < sources; ++s) {
    inputs.push_back(random_words(random, bytes / 8 + 4, dtype));
    pointers.push_back(reinterpret_cast<std::byte*>(inputs.back().data()) + skew * element);
  }
  kernels::Reduction reduction{dtype, op, rounding, op == ReduceOp::Avg ? 1.0 / sources : 1.0};
  std::vector<std::byte> expected(bytes + 16), first(bytes + 16), second(bytes + 16);
  void* destination = expected.data();
  kernels::reduce(reduction, pointers.data(), sources, &destination, 1, count);

  cuda::ReduceArgs args{.source_count = sources, .destination_count = 2, .count = count, .scale = reduction.scale};
  std::copy(pointers.begin(), pointers.end(), args.sources);
  args.destinations[0] = first.data();
  args.destinations[1] = second.data();
  run_reduce(reduction, args);
  CHECK_EQ(first_difference(dtype, expected.data(), first.data(), count), -1);
  CHECK_EQ(first_difference(dtype, first.data(), second.data(), count), -1);

  args.destination_count = 1;  // in place
  args.destinations[0] = const_cast<void*>(pointers[0]);
  run_reduce(reduction, args);
  CHECK_EQ(first_difference(dtype, expected.data(), pointers[0], count), -1);
}

}  // namespace

TEST(cuda_bodies_have_the_bits_of_the_cpu_kernels) {
  for (DType dtype : testing::kDTypes) {
    for (ReduceOp op : testing::kOps) {
      if (!is_supported(dtype, op)) continue;
      for (auto rounding : {kernels::Rounding::Once, kernels::Rounding::EveryHop})
        for (int sources : {1, 2, 3, 4, 8, 16})
          for (size_t bytes : {0, 8, 16, 248, 4096})
            for (size_t skew : {0, 1}) compare(dtype, op, rounding, sources, bytes, skew);
    }
  }
}

// As the engine does on the CPU, by other code.
TEST(cuda_bodies_note_what_is_not_finite_as_the_engine_does) {
  std::mt19937_64 random(8);
  for (DType dtype : testing::kFloatingDTypes) {
    for (int sources : {1, 2, 3, 8}) {
      for (size_t bytes : {16, 248, 4096}) {
        const size_t count = bytes / element_size(dtype);
        std::vector<std::vector<uint64_t>> inputs;  // random bits: every float16 in 32 is not finite
        std::vector<const void*> pointers;
        std::vector<int> ranks;
        cuda::NoteArgs args{.sum = {.source_count = sources, .count = count, .scale = 0.5}, .first = 1000};
        for (int s = 0; s < sources; ++s) {
          inputs.push_back(random_words(random, bytes / 8, dtype));
          args.sum.sources[s] = pointers.emplace_back(inputs.back().data());
          args.ranks[s] = static_cast<int8_t>(ranks.emplace_back(sources - 1 - s));
        }
        std::vector<std::byte> result(bytes);
        void* destination = result.data();
        std::vector<uint64_t> noted(sources + 1, Nonfinite::kNothing);
        args.words = noted.data();
        const Nonfinite nonfinite{.words = std::shared_ptr<uint64_t[]>(new uint64_t[sources + 1]), .begin = 1000};
        std::fill_n(nonfinite.words.get(), sources + 1, Nonfinite::kNothing);
        const Operation operation{.dtype = dtype, .nonfinite = std::make_shared<const Nonfinite>(nonfinite)};
        const kernels::Reduction reduction{dtype, ReduceOp::Sum, kernels::Rounding::Once, 0.5};
        testing::run_note(reduction, args);
        reduce_noting(operation, sources, 0, reduction, pointers.data(), ranks.data(), sources, &destination, 1, count);
        CHECK(std::equal(noted.begin(), noted.end(), nonfinite.words.get()));
        CHECK(bytes < 4096 || element_size(dtype) > 2 || noted[sources - 1] != Nonfinite::kNothing);
      }
    }
  }
}

TEST(cuda_bodies_convert_every_half_as_the_cpu_does) {
  for (DType dtype : {DType::Float16, DType::BFloat16}) {
    std::vector<uint16_t> halves(65536), expected(65536), actual(65536);
    for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
    const void* source = halves.data();
    void* destination = expected.data();
    for (double scale : {1.0, 1.0 / 3, 0.5, 1e-3}) {
      kernels::Reduction reduction{dtype, ReduceOp::Sum, kernels::Rounding::Once, scale};
      kernels::reduce(reduction, &source, 1, &destination, 1, halves.size());
      cuda::ReduceArgs args{.source_count = 1, .destination_count = 1, .count = halves.size(), .scale = scale};
      args.sources[0] = source;
      args.destinations[0] = actual.data();
      run_reduce(reduction, args);
      CHECK_EQ(first_difference(dtype, expected.data(), actual.data(), halves.size()), -1);
    }
  }
}

TEST(cuda_copies_any_alignment) {
  std::vector<std::byte> source(5000), destination(5000);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7);
  for (size_t skew : {0, 1, 16}) {
    for (size_t bytes : {0, 1, 15, 16, 17, 4097}) {
      std::fill(destination.begin(), destination.end(), std::byte{0});
      for (int thread = 0; thread < 5; ++thread)
        cuda::copy_run(destination.data(), source.data() + skew, bytes, thread, 5);
      CHECK(std::memcmp(destination.data(), source.data() + skew, bytes) == 0);
      CHECK(destination[bytes] == std::byte{0});
    }
  }
}

}  // namespace syncengine
