// What a sum's bits must be: an oracle that shares no code with the engine, and an all-reduce held against it on every
// kind of memory.
#pragma once

#include <array>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gloo_ring.h"
#include "job.h"
#include "kernels_oracle.h"
#include "tree_oracle.h"

namespace syncengine::testing {

using Bytes = std::vector<uint8_t>;

struct Case {
  DType dtype;
  ReduceOp op;
  size_t count;
  double prescale = 1.0, postscale = 1.0;
  uint32_t leaves = 0;  // with Numerics::Tree
};

// What every rank contributes. Floats of mixed size, so that the order of addition shows; bit patterns for the rest.
inline Bytes contribution(const Case& what, int rank) {
  const size_t size = element_size(what.dtype);
  Bytes bytes(what.count * size);
  std::mt19937_64 random(what.count * 100 + static_cast<size_t>(rank));
  std::array<float, 12> scales;  // of signed numbers of 32 bits: from 2^-6 to 2^5
  for (int i = 0; i < 12; ++i) scales[i] = std::ldexp(1.0f, i - 6 - 31);
  for (size_t i = 0; i < what.count; ++i) {
    uint64_t bits = random();
    const float value = static_cast<float>(static_cast<int32_t>(bits >> 32)) * scales[bits % 12];
    if (what.dtype == DType::Bool) bits &= 1;
    if (what.dtype == DType::Float16) bits = encode(kFloat16, value);
    if (what.dtype == DType::BFloat16) bits = encode(kBFloat16, value);
    if (what.dtype == DType::Float32) std::memcpy(&bits, &value, 4);
    if (what.dtype == DType::Float64) {
      const double wide = value * (1 + static_cast<double>(bits >> 32) * 0x1p-40);
      std::memcpy(&bits, &wide, 8);
    }
    std::memcpy(bytes.data() + i * size, &bits, size);
  }
  return bytes;
}

inline std::vector<Bytes> contributions(const Case& what, int world) {
  std::vector<Bytes> parts;
  for (int rank = 0; rank < world; ++rank) parts.push_back(contribution(what, rank));
  return parts;
}

inline Bytes oracle(const Case& what, Numerics numerics, std::vector<Bytes> parts) {
  const bool ring = numerics == Numerics::Ring;
  const int world = static_cast<int>(parts.size());
  if (what.prescale != 1.0) {
    for (Bytes& part : parts)
      part = expected({what.dtype, ReduceOp::Sum, kernels::Rounding::Once, what.prescale}, {part.data()}, what.count);
  }
  if (numerics == Numerics::Tree) {
    const Bytes all = sum_of_tree(what.leaves, parts, [&](const Bytes& left, const Bytes& right) {
      return expected({what.dtype, what.op}, {left.data(), right.data()}, what.count);
    });
    return expected({what.dtype, what.op, kernels::Rounding::Once, what.postscale}, {all.data()}, what.count);
  }
  std::vector<int> rank_order(world);
  std::iota(rank_order.begin(), rank_order.end(), 0);
  const size_t size = element_size(what.dtype), bytes = what.count * size;
  std::vector<GlooSegment> segments{{0, bytes, rank_order}};
  if (ring) segments = gloo_ring(bytes, size, world);
  Bytes result;
  for (const auto& segment : segments) {
    std::vector<const void*> sources;
    for (int rank : segment.order) sources.push_back(parts[rank].data() + segment.begin);
    const auto rounding = ring ? kernels::Rounding::EveryHop : kernels::Rounding::Once;
    Bytes piece =
        expected({what.dtype, what.op, rounding, what.postscale}, sources, (segment.end - segment.begin) / size);
    result.insert(result.end(), piece.begin(), piece.end());
  }
  return result;
}

// Pieces of odd numbers of elements with holes between them.
struct Scattered {
  Scattered(const Bytes& content, size_t element) : memory(content.size() * 2 + 64) {
    std::mt19937 random(static_cast<unsigned>(content.size()));
    size_t place = element;
    for (size_t begin = 0; begin < content.size();) {
      const size_t length = std::min(content.size() - begin, (2 * (random() % 40) + 1) * element);
      std::memcpy(memory.data() + place, content.data() + begin, length);
      spans.add(memory.data() + place, length);
      begin += length;
      place += length + element * (random() % 2);
    }
  }
  Bytes content() const {
    Bytes result;
    for (const Span& span : spans.spans()) {
      auto* data = reinterpret_cast<const uint8_t*>(span.data);
      result.insert(result.end(), data, data + span.bytes);
    }
    return result;
  }
  Bytes memory;
  SpanList spans;
};

inline void run_case(Communicator& communicator, const Case& what, const SpanList& memory, bool announced = false) {
  Operation operation{.dtype = what.dtype,
                      .op = what.op,
                      .numerics = what.leaves > 0 ? Numerics::Tree : communicator.numerics(),
                      .leaves = what.leaves,
                      .prescale = what.prescale,
                      .postscale = what.postscale,
                      .input = memory,
                      .output = memory};
  if (announced)
    communicator.wait(communicator.announce(communicator.reserve_slots(1), 0, 1, operation));
  else
    communicator.run(operation);
}

inline void check_bits(const Case& what, const Bytes& got, const Bytes& wanted, const char* how) {
  CHECK_EQ(got.size(), wanted.size());
  const long place = first_difference(what.dtype, got.data(), wanted.data(), what.count);
  if (place >= 0)
    throw Failure(std::string(how) + ": " + name(what.dtype) + " " + name(what.op) + " of " +
                  std::to_string(what.count) + " elements differs from the oracle at " + std::to_string(place));
}

// The same all-reduce on ordinary memory, in the arena, on many small spans, and announced: the same bits.
inline void check_everywhere(Communicator& communicator, const Case& what, const Bytes& mine, const Bytes& wanted) {
  for (bool announced : {false, true}) {
    Bytes ordinary = mine;
    run_case(communicator, what, {ordinary.data(), ordinary.size()}, announced);
    check_bits(what, ordinary, wanted, announced ? "announced" : "ordinary memory");
  }

  auto shared = communicator.allocate(mine.size());
  auto* data = static_cast<uint8_t*>(shared.get());
  std::copy(mine.begin(), mine.end(), data);
  run_case(communicator, what, {data, mine.size()});
  check_bits(what, Bytes(data, data + mine.size()), wanted, "arena");

  Scattered scattered(mine, element_size(what.dtype));
  run_case(communicator, what, scattered.spans);
  check_bits(what, scattered.content(), wanted, "spans");
}

// The contributions of the ranks to a list of cases, and the result that each case must have.
struct Wanted {
  Wanted(const std::vector<Case>& cases, Numerics numerics, int world) : cases(cases) {
    for (const Case& what : cases) {
      brought.push_back(contributions(what, world));
      bytes.push_back(oracle(what, numerics, brought.back()));
    }
  }
  void check_everywhere(Communicator& communicator) const {
    for (size_t i = 0; i < cases.size(); ++i)
      testing::check_everywhere(communicator, cases[i], brought[i][communicator.rank()], bytes[i]);
  }
  std::vector<Case> cases;
  std::vector<std::vector<Bytes>> brought;  // of each case, by rank
  std::vector<Bytes> bytes;
};

}  // namespace syncengine::testing
