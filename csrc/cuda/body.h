// Bodies of the kernels, as functions of one thread of a grid, for host and device: the core's tests run them on the
// CPU.
//
// Ownership: none. Aliasing: a destination may be exactly a source. Alignment: of an element; 16 bytes are faster.
// Failure: none. A gate that does not find what it expects makes every thread write `all ones` (NaN in every floating
// dtype) instead of a result.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "cuda/control.h"
#include "kernels/element.h"
#include "kernels/reduce.h"

namespace syncengine::cuda {

// A kernel's check before it uses peers' bytes: each word for which its stream has just waited must be `expected`.
struct Gate {
  const uint32_t* words = nullptr;  // of each rank; null: no check
  Control* control = nullptr;       // this rank's
  uint32_t expected = 0;
  int rank = 0, world = 0;
};

struct ReduceArgs {
  const void* sources[kMaxRanks];
  void* destinations[2];
  int source_count = 0, destination_count = 0;
  size_t count = 0;  // elements
  double scale = 1.0;
  Gate gate;
};

// Arguments of the kernel that, before a sum is made, notes in Nonfinite's words which ranks bring NaN or infinity.
struct NoteArgs {
  ReduceArgs sum;
  int8_t ranks[kMaxRanks];    // the rank of each source
  uint64_t* words = nullptr;  // at the address for kernels
  uint64_t first = 0;         // the number of the first element
};

// Pieces of memory, each a run of bytes.
struct CopyArgs {
  const void* sources[kMaxRanks];
  void* destinations[kMaxRanks];
  size_t bytes[kMaxRanks];
  int pieces = 0;
  Gate gate;
};

#ifdef __CUDACC__
struct alignas(16) Pack {
#else
struct alignas(16) [[gnu::may_alias]] Pack {
#endif
  uint32_t words[4];
};

// Read and write a word of Control, on the device or in threads that stand in for it in tests.
SYNCENGINE_BOTH uint32_t get_word(const uint32_t* word) {
#ifdef __CUDA_ARCH__
  return *static_cast<const volatile uint32_t*>(word);
#else
  return load(*word);
#endif
}
SYNCENGINE_BOTH void set_word(uint32_t* word, uint32_t value) {
#ifdef __CUDA_ARCH__
  *static_cast<volatile uint32_t*>(word) = value;
#else
  store(*word, value);
#endif
}

SYNCENGINE_BOTH void tell_mismatch(Control& control, int peer, uint32_t theirs, uint32_t own) {
  set_word(control.mismatch + 1, theirs);
  set_word(control.mismatch + 2, own);
#ifdef __CUDA_ARCH__
  __threadfence_system();
#endif
  set_word(control.mismatch, 1 + static_cast<uint32_t>(peer));  // last, since the watchdog looks at this word
}

// Whether the gate is shut for rank `i`: a peer sent another word, or this rank was aborted. A thread checks one rank.
SYNCENGINE_BOTH bool is_shut(const Gate& gate, int i) {
  if (i == gate.rank) return get_word(&gate.control->aborted) != 0;
  const uint32_t word = get_word(gate.words + i);
  if (word == gate.expected) return false;
  if (word != kReleased) tell_mismatch(*gate.control, i, word, gate.expected);
  return true;
}

SYNCENGINE_BOTH void count_progress(Control& control) {
  set_word(&control.progress, get_word(&control.progress) + 1);  // one writer
}

SYNCENGINE_BOTH bool is_packed(const void* pointer) { return (reinterpret_cast<uintptr_t>(pointer) & 15) == 0; }

template <class Stored>
SYNCENGINE_BOTH const Stored* in(const ReduceArgs& args, int s) {
  return static_cast<const Stored*>(args.sources[s]);
}
template <class Stored>
SYNCENGINE_BOTH Stored* out(const ReduceArgs& args, int d) {
  return static_cast<Stored*>(args.destinations[d]);
}

SYNCENGINE_BOTH void note_least(uint64_t* word, uint64_t value) {
#ifdef __CUDA_ARCH__
  atomicMin(reinterpret_cast<unsigned long long*>(word), static_cast<unsigned long long>(value));
#else
  uint64_t seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
#endif
}

template <class Element, class Op, kernels::Rounding kRounding>
SYNCENGINE_BOTH typename Element::Value hop(typename Element::Value a, typename Element::Value b) {
  auto value = Op::apply(a, b);
  if constexpr (kRounding == kernels::Rounding::EveryHop) value = Element::widen(Element::narrow(value));
  return value;
}

template <class Element>
SYNCENGINE_BOTH typename Element::Stored finish(typename Element::Value value, double scale) {
  if constexpr (Element::kFloating) value = value * static_cast<typename Element::Scale>(scale);
  return Element::narrow(value);
}

// Reduces a 16-byte vector of each source. load() comes first: it loads all `kSources` vectors, or if 0, only one.
template <class Element, class Op, kernels::Rounding kRounding, int kSources, class Args>
struct PackReduction {
  using Stored = typename Element::Stored;
  using Value = typename Element::Value;
  static constexpr int kLanes = 16 / sizeof(Stored);
  struct Lanes {
    Stored of[kLanes];
  };
  static constexpr int kHeld = kSources ? kSources : 1;

  Pack loaded[kHeld];

  SYNCENGINE_BOTH void load(const Args& args, size_t v) {
    SYNCENGINE_UNROLL
    for (int s = 0; s < kHeld; ++s) loaded[s] = in<Pack>(args, s)[v];
  }
  SYNCENGINE_BOTH void finish_into(const Args& args, size_t v) {
    Value values[kLanes];
    const Lanes first = kernels::bits_as<Lanes>(loaded[0]);
    SYNCENGINE_UNROLL
    for (int i = 0; i < kLanes; ++i) values[i] = Element::widen(first.of[i]);
    SYNCENGINE_UNROLL
    for (int s = 1; s < kHeld; ++s) add(values, loaded[s]);
    if constexpr (kSources == 0)
      for (int s = 1; s < args.source_count; ++s) add(values, in<Pack>(args, s)[v]);
    Lanes result;
    SYNCENGINE_UNROLL
    for (int i = 0; i < kLanes; ++i) result.of[i] = finish<Element>(values[i], args.scale);
    for (int d = 0; d < args.destination_count; ++d) out<Pack>(args, d)[v] = kernels::bits_as<Pack>(result);
  }

 private:
  SYNCENGINE_BOTH static void add(Value (&values)[kLanes], Pack pack) {
    const Lanes lanes = kernels::bits_as<Lanes>(pack);
    SYNCENGINE_UNROLL
    for (int i = 0; i < kLanes; ++i) values[i] = hop<Element, Op, kRounding>(values[i], Element::widen(lanes.of[i]));
  }
};

template <class Element, class Op, kernels::Rounding kRounding, class Args>
SYNCENGINE_BOTH typename Element::Stored reduced(const Args& args, size_t i) {
  using Stored = typename Element::Stored;
  auto value = Element::widen(in<Stored>(args, 0)[i]);
  for (int s = 1; s < args.source_count; ++s)
    value = hop<Element, Op, kRounding>(value, Element::widen(in<Stored>(args, s)[i]));
  return finish<Element>(value, args.scale);
}

// This thread's share of a reduction, of which `threads` threads do all. kSources is the number of sources, or 0 for
// any number. Args is ReduceArgs, or a type with the same counts and scale, and with in() and out() of its own.
template <class Element, class Op, kernels::Rounding kRounding, int kSources, class Args>
SYNCENGINE_BOTH void reduce_share(const Args& args, size_t thread, size_t threads) {
  constexpr size_t kLanes = 16 / sizeof(typename Element::Stored);
  // This many vectors have enough loads in flight to keep the memory busy from few blocks, and fit into registers.
  constexpr int kUnroll = kSources == 0 ? 2 : kSources >= 8 ? 1 : 8 / kSources;
  bool packed = true;
  for (int s = 0; s < args.source_count; ++s) packed &= is_packed(in<Pack>(args, s));
  for (int d = 0; d < args.destination_count; ++d) packed &= is_packed(out<Pack>(args, d));
  const size_t vectors = packed ? args.count / kLanes : 0;
  size_t v = thread;
  for (; v + (kUnroll - 1) * threads < vectors; v += kUnroll * threads) {
    PackReduction<Element, Op, kRounding, kSources, Args> packs[kUnroll];
    SYNCENGINE_UNROLL
    for (int u = 0; u < kUnroll; ++u) packs[u].load(args, v + u * threads);
    SYNCENGINE_UNROLL
    for (int u = 0; u < kUnroll; ++u) packs[u].finish_into(args, v + u * threads);
  }
  for (; v < vectors; v += threads) {
    PackReduction<Element, Op, kRounding, kSources, Args> pack;
    pack.load(args, v);
    pack.finish_into(args, v);
  }
  for (size_t i = vectors * kLanes + thread; i < args.count; i += threads) {
    const auto result = reduced<Element, Op, kRounding>(args, i);
    for (int d = 0; d < args.destination_count; ++d) out<typename Element::Stored>(args, d)[i] = result;
  }
}

// This thread's share of finding out, before anything is written, why a sum is NaN or infinite: notes each rank that
// brings such a value, or, if none does, the sum itself.
template <class Element, kernels::Rounding kRounding>
SYNCENGINE_BOTH void note_share(const NoteArgs& args, size_t thread, size_t threads) {
  constexpr uint32_t kFinite = 3;
  for (size_t i = thread; i < args.sum.count; i += threads) {
    const uint32_t made =
        kernels::flaw_of(Element::widen(reduced<Element, kernels::SumElement, kRounding>(args.sum, i)));
    if (made == kFinite) continue;
    bool brought = false;
    for (int s = 0; s < args.sum.source_count; ++s) {
      const uint32_t flaw = kernels::flaw_of(Element::widen(in<typename Element::Stored>(args.sum, s)[i]));
      if (flaw == kFinite) continue;
      brought = true;
      note_least(args.words + args.ranks[s], (args.first + i) << 2 | flaw);
    }
    if (!brought) note_least(args.words + args.sum.source_count, (args.first + i) << 2 | made);
  }
}

SYNCENGINE_BOTH void poison_bytes(void* memory, size_t bytes, size_t thread, size_t threads) {
  auto* data = static_cast<unsigned char*>(memory);
  for (size_t i = thread; i < bytes; i += threads) data[i] = 0xff;
}

SYNCENGINE_BOTH void poison_share(const ReduceArgs& args, size_t element_bytes, size_t thread, size_t threads) {
  for (int d = 0; d < args.destination_count; ++d)
    poison_bytes(out<unsigned char>(args, d), args.count * element_bytes, thread, threads);
}

// Copies this thread's share. source(offset) is an address; each 16 bytes are contiguous, and aligned if the first are.
template <class Source>
SYNCENGINE_BOTH void copy_from(void* destination, const Source& source, size_t bytes, size_t thread, size_t threads) {
  const size_t vectors = bytes && is_packed(source(0)) && is_packed(destination) ? bytes / sizeof(Pack) : 0;
  constexpr int kUnroll = 8;
  auto from = [&](size_t v) { return *reinterpret_cast<const Pack*>(source(v * sizeof(Pack))); };
  auto* to = static_cast<Pack*>(destination);
  size_t v = thread;
  for (; v + (kUnroll - 1) * threads < vectors; v += kUnroll * threads) {
    Pack packs[kUnroll];
    SYNCENGINE_UNROLL
    for (int u = 0; u < kUnroll; ++u) packs[u] = from(v + u * threads);
    SYNCENGINE_UNROLL
    for (int u = 0; u < kUnroll; ++u) to[v + u * threads] = packs[u];
  }
  for (; v < vectors; v += threads) to[v] = from(v);
  for (size_t i = vectors * sizeof(Pack) + thread; i < bytes; i += threads)
    static_cast<unsigned char*>(destination)[i] = *source(i);
}

SYNCENGINE_BOTH void copy_run(void* destination, const void* source, size_t bytes, size_t thread, size_t threads) {
  auto from = [source](size_t at) { return static_cast<const unsigned char*>(source) + at; };
  copy_from(destination, from, bytes, thread, threads);
}

// The choice of a kernel's instance for a dtype and an op: one table for the device and for the tests of the bodies.

// Sums of floating dtypes are what training does, so they have all their loads unrolled for the usual numbers of ranks.
template <class E, kernels::Rounding kR, class Visit>
void visit_arithmetic(ReduceOp op, int sources, Visit&& visit) {
  if (op == ReduceOp::Product) return visit.template operator()<E, kernels::ProductElement, kR, 0>();
  if constexpr (E::kFloating && kR == kernels::Rounding::Once) {
    if (sources == 2) return visit.template operator()<E, kernels::SumElement, kR, 2>();
    if (sources == 4) return visit.template operator()<E, kernels::SumElement, kR, 4>();
    if (sources == 8) return visit.template operator()<E, kernels::SumElement, kR, 8>();
  }
  visit.template operator()<E, kernels::SumElement, kR, 0>();
}

// Calls visit<Element, Op, kRounding, kSources>() once. The op must be supported for the dtype.
template <class E, class Visit>
void visit_element(ReduceOp op, kernels::Rounding rounding, int sources, Visit&& visit) {
  using kernels::Rounding;
  if (op == ReduceOp::Min) return visit.template operator()<E, kernels::MinElement, Rounding::Once, 0>();
  if (op == ReduceOp::Max) return visit.template operator()<E, kernels::MaxElement, Rounding::Once, 0>();
  // Wider dtypes are rounded at each addition in either mode, and need no instance for EveryHop.
  if constexpr (E::kFloating && sizeof(typename E::Stored) == 2)
    if (rounding == Rounding::EveryHop) return visit_arithmetic<E, Rounding::EveryHop>(op, sources, visit);
  visit_arithmetic<E, Rounding::Once>(op, sources, visit);
}

// Calls visit(Element{}) once.
template <class Visit>
void visit_dtype(DType dtype, Visit&& visit) {
  switch (dtype) {
    case DType::Float16: return visit(kernels::Float16Element{});
    case DType::BFloat16: return visit(kernels::BFloat16Element{});
    case DType::Float32: return visit(kernels::PlainElement<float>{});
    case DType::Float64: return visit(kernels::PlainElement<double>{});
    case DType::Int8: return visit(kernels::PlainElement<int8_t>{});
    case DType::Int16: return visit(kernels::PlainElement<int16_t>{});
    case DType::Int32: return visit(kernels::PlainElement<int32_t>{});
    case DType::Int64: return visit(kernels::PlainElement<int64_t>{});
    case DType::UInt8:
    case DType::Bool: return visit(kernels::PlainElement<uint8_t>{});
  }
}

}  // namespace syncengine::cuda
