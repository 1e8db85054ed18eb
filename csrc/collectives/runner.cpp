#include "collectives/runner.h"

#include <cstring>
#include <numeric>

#include "kernels/element.h"

namespace syncengine {

namespace {

constexpr size_t kPiece = 256 << 10;

// Calls visit(offset, bytes) for pieces of at most kPiece. Returns false if `stop` returned true in between.
template <class Visit>
bool in_pieces(size_t bytes, const std::function<bool()>& stop, Visit&& visit) {
  for (size_t done = 0; done < bytes; done += kPiece) {
    if (done > 0 && stop()) return false;
    visit(done, std::min(kPiece, bytes - done));
  }
  return true;
}

Nonfinite::Kind kind_at(DType dtype, const void* memory, size_t i) {
  auto kind = [&]<class Element>(Element) {
    return static_cast<Nonfinite::Kind>(
        kernels::flaw_of(Element::widen(static_cast<const typename Element::Stored*>(memory)[i])));
  };
  switch (dtype) {
    case DType::Float16: return kind(kernels::Float16Element{});
    case DType::BFloat16: return kind(kernels::BFloat16Element{});
    case DType::Float64: return kind(kernels::PlainElement<double>{});
    default: return kind(kernels::PlainElement<float>{});
  }
}

}  // namespace

void reduce_noting(const Operation& operation, int world, size_t input, const kernels::Reduction& reduction,
                   const void* const* sources, const int* ranks, int source_count, void* const* destinations,
                   int destination_count, size_t count) {
  const Nonfinite* nonfinite = operation.nonfinite.get();
  if (!nonfinite) {
    kernels::reduce(reduction, sources, source_count, destinations, destination_count, count);
    return;
  }
  auto place = nonfinite->locate(input, count, element_size(operation.dtype));
  const size_t element = element_size(reduction.dtype);
  std::vector<const void*> from(sources, sources + source_count);
  std::vector<void*> to(destinations, destinations + destination_count);
  auto skip = [&](size_t elements) {
    for (auto& source : from) source = static_cast<const std::byte*>(source) + elements * element;
    for (auto& destination : to) destination = static_cast<std::byte*>(destination) + elements * element;
    place.first += elements;
    place.valid -= std::min(place.valid, elements);
    count -= elements;
  };
  kernels::Reduction stopping = reduction;
  stopping.stops_at_nonfinite = true;
  for (;;) {
    skip(kernels::reduce(stopping, from.data(), source_count, to.data(), destination_count, count));
    if (count == 0) return;
    // Results are kept aside until the contributions have been checked: results may go where contributions lie.
    const size_t block = std::min(count, kernels::kBlockBytes / element);
    alignas(8) std::byte results[kernels::kBlockBytes];
    void* result = results;
    kernels::reduce(reduction, from.data(), source_count, &result, 1, block);
    for (size_t i = 0; i < std::min(block, place.valid); ++i) {
      const auto made = kind_at(reduction.dtype, results, i);
      if (made == Nonfinite::None) continue;
      bool brought = false;
      for (int s = 0; s < source_count; ++s) {
        const auto kind = kind_at(reduction.dtype, from[s], i);
        if (kind == Nonfinite::None) continue;
        brought = true;
        if (ranks[s] >= 0) nonfinite->note(ranks[s], place.first + i, kind);
      }
      if (!brought) nonfinite->note(world, place.first + i, made);
    }
    kernels::reduce(reduction, from.data(), source_count, to.data(), destination_count, block);
    skip(block);
  }
}

void note_overflow(const Operation& operation, int world, size_t input, const std::byte* results, const float* sums,
                   size_t count) {
  if (!operation.nonfinite) return;
  const auto place = operation.nonfinite->locate(input, count, element_size(operation.dtype));
  for (size_t i = 0; i < std::min(count, place.valid); ++i) {
    const auto kind = kind_at(operation.dtype, results, i);
    if (kind == Nonfinite::None || kind_at(DType::Float32, sums, i) != Nonfinite::None) continue;
    operation.nonfinite->note(world, place.first + i, kind);
  }
}

void Runner::stage(const Operation& operation, const ChunkPlan& plan) {
  size_t element = element_size(operation.dtype);
  for (const Copy& copy : plan.stage) {
    std::byte* slot = bases_[rank_].at(copy.slot);
    operation.input.for_each(copy.user, copy.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
      kernels::copy_scaled(operation.dtype, slot + offset, memory, bytes / element, operation.prescale);
    });
  }
}

void for_each_run(const Operation& operation, int sources, size_t input, size_t output, size_t bytes,
                  std::vector<int>& order, const std::function<void(const Run& run)>& visit) {
  const bool ring = operation.numerics == Numerics::Ring;
  const size_t element = element_size(operation.dtype);
  // Part p of a reduce-scatter is the ring's chunk p; an all-reduce is cut as Gloo cuts it.
  const RingCut cut = operation.collective == Collective::AllReduce
                          ? ring_cut(operation.input.bytes(), element, sources)
                          : RingCut{std::max(block_bytes(operation), element)};
  order.resize(sources);
  std::iota(order.begin(), order.end(), 0);
  auto visit_in_order = [&](std::byte* own, std::byte* out, size_t offset, size_t length) {
    for (size_t done = 0, part = length; done < length; done += part, part = length - done) {
      if (ring) {
        const size_t position = input + offset + done;
        const int chunk = cut.chunk_of(position);
        part = std::min(part, (chunk + 1) * cut.chunk - position);
        ring_order(chunk, sources, order);
      }
      visit({own + done, out ? out + done : nullptr, offset + done, part});
    }
  };
  operation.input.for_each(input, bytes, [&](std::byte* own, size_t offset, size_t length) {
    if (output == kNoOutput) return visit_in_order(own, nullptr, offset, length);
    operation.output.for_each(output + offset, length, [&](std::byte* out, size_t skip, size_t part) {
      visit_in_order(own + skip, out, offset + skip, part);
    });
  });
}

bool Runner::reduce(const Operation& operation, const ChunkPlan& plan, const std::function<bool()>& stop) {
  const Reduce& step = plan.reduce;
  return in_pieces(step.bytes, stop, [&](size_t piece, size_t bytes) {
    for_each_run(operation, world_, step.input + piece, step.output + piece, bytes, order_,
                 [&](const Run& run) { reduce_run(operation, step, piece + run.offset, run); });
  });
}

// Reduces one run, adding the ranks' contributions as order_ says; `offset` is the run's offset in the step.
void Runner::reduce_run(const Operation& operation, const Reduce& step, size_t offset, const Run& run) {
  for (int i = 0; i < world_; ++i) {
    const int rank = order_[i];
    bool from_user = rank == rank_ && !step.own_from_slot;
    sources_[i] = from_user ? run.own : bases_[rank].at(step.slot + offset);
  }
  int count = 0;
  destinations_[count++] = run.out;
  for (int rank = 0; rank < world_ && step.into_peers; ++rank) {
    if (rank != rank_) destinations_[count++] = bases_[rank].at(step.slot + offset);
  }
  kernels::Reduction reduction{operation.dtype, operation.op, rounding_of(operation.numerics), operation.postscale};
  if (operation.numerics == Numerics::Tree) reduction.merges = tree_.of(operation.leaves, world_).data();
  reduce_noting(operation, world_, step.input + offset, reduction, sources_.data(), order_.data(), world_,
                destinations_.data(), count, run.bytes / element_size(operation.dtype));
}

bool Runner::pull(const Operation& operation, const ChunkPlan& plan, const std::function<bool()>& stop) {
  for (const Pull& step : plan.pull) {
    bool done = in_pieces(step.bytes, stop, [&](size_t piece, size_t piece_bytes) {
      operation.output.for_each(step.user + piece, piece_bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
        const std::byte* source = bases_[step.peer].at(step.slot + piece + offset);
        if (memory != source) std::memcpy(memory, source, bytes);  // equal for an all-gather in place
      });
    });
    if (!done) return false;
  }
  return true;
}

const std::byte* InterhostRunner::contribution(const View& view, int rank,
                                               const std::function<std::byte*()>& room) const {
  const InterhostCell& cell = view.cell;
  if (!in_slot(view, rank)) return view.operation.input.readable(cell.input, cell.bytes, room);
  const Runner::Base& from = base(view, rank);
  return from.spans ? from.spans->readable(place(view), cell.bytes, room) : from.slot + place(view);
}

void InterhostRunner::fold(const View& view, const InterhostStep& step, const std::vector<std::byte*>& received,
                           std::byte* partial) {
  const Operation& operation = view.operation;
  const InterhostCell& cell = view.cell;
  if (operation.numerics == Numerics::Tree) find_merges(operation, step);
  for_each_run(operation, static_cast<int>(step.fold.size()), cell.input, partial ? kNoOutput : cell.output, cell.bytes,
               order_, [&](const Run& run) {
                 destinations_.clear();
                 destinations_.push_back(partial ? partial + run.offset * (view.wide ? 2 : 1) : run.out);
                 for (int local : placement_.locals())
                   if (!partial && cell.spreading == Spreading::Peers && local != placement_.rank)
                     destinations_.push_back(base(view, local).at(place(view) + run.offset));
                 fold_run(view, step, received, run, partial);
               });
}

// Finds how the sources of a step are added in a tree. A sum from another host stands for that host's ranks and
// includes the merges among them; so does a sum that leaves this host.
void InterhostRunner::find_merges(const Operation& operation, const InterhostStep& step) {
  const auto& of_ranks = tree_.of(operation.leaves, placement_.size);
  merges_.clear();
  size_t before = 0;
  for (const auto& [rank, received] : step.fold) {
    const int whose = rank >= 0 ? rank : step.receives[received].rank;
    size_t merges = whose >= 0 ? of_ranks[whose] : 0;
    if (whose < 0) {
      const auto& host = placement_.members[placement_.host_of[step.receives[received].peer]];
      for (int member : host) merges += of_ranks[member];
      merges -= host.size() - 1;
    }
    merges_.push_back(static_cast<uint8_t>(std::min(merges, merges_.size() - before)));
    before += merges_.back();
  }
}

void InterhostRunner::fold_run(const View& view, const InterhostStep& step, const std::vector<std::byte*>& received,
                               const Run& run, std::byte* partial) {
  sources_.clear();
  is_wide_.clear();
  ranks_.clear();
  for (int i : order_) {
    const InterhostStep::FoldSource& source = step.fold[i];
    ranks_.push_back(source.rank < 0 ? step.receives[source.received].rank : source.rank);
    bool prefix = source.rank < 0 && step.receives[source.received].content == Content::Partial && view.wide;
    is_wide_.push_back(prefix);
    if (source.rank < 0)
      sources_.push_back(received[source.received] + run.offset * (prefix ? 2 : 1));
    else if (in_slot(view, source.rank))
      sources_.push_back(base(view, source.rank).at(place(view) + run.offset));
    else
      sources_.push_back(run.own);
  }
  if (view.wide) return fold_wide(view, run.offset, run.bytes, partial);
  const Operation& operation = view.operation;
  kernels::Reduction reduction{operation.dtype, operation.op, rounding_of(operation.numerics),
                               partial ? 1.0 : operation.postscale};
  if (operation.numerics == Numerics::Tree) reduction.merges = merges_.data();
  reduce_noting(operation, placement_.size, view.cell.input + run.offset, reduction, sources_.data(), ranks_.data(),
                static_cast<int>(sources_.size()), destinations_.data(), static_cast<int>(destinations_.size()),
                run.bytes / element_size(operation.dtype));
}

// Adds 16-bit floats in float32: the same additions as in one kernel call, but partial sums that come from other hosts,
// or go there, are float32.
void InterhostRunner::fold_wide(const View& view, size_t offset, size_t bytes, std::byte* partial) {
  constexpr size_t kWidePiece = 4096;  // elements that are widened at a time: they stay in the cache
  const Operation& operation = view.operation;
  size_t count = bytes / sizeof(uint16_t), sources = sources_.size();
  floats_.resize((sources + 1) * kWidePiece);
  std::vector<const void*> wide(sources);
  for (size_t done = 0; done < count; done += kWidePiece) {
    size_t length = std::min(kWidePiece, count - done);
    for (size_t i = 0; i < sources; ++i) {
      auto* source = static_cast<const std::byte*>(sources_[i]);
      float* copy = floats_.data() + i * kWidePiece;
      if (!is_wide_[i]) kernels::widen(operation.dtype, copy, source + done * sizeof(uint16_t), length);
      wide[i] = is_wide_[i] ? static_cast<const void*>(source + done * sizeof(float)) : copy;
    }
    void* sum = partial ? static_cast<std::byte*>(destinations_[0]) + done * sizeof(float)
                        : static_cast<void*>(floats_.data() + sources * kWidePiece);
    kernels::Reduction reduction{DType::Float32, operation.op, kernels::Rounding::Once,
                                 partial ? 1.0 : operation.postscale};
    const size_t input = view.cell.input + offset + done * sizeof(uint16_t);
    reduce_noting(operation, placement_.size, input, reduction, wide.data(), ranks_.data(), static_cast<int>(sources),
                  &sum, 1, length);
    if (partial) continue;
    for (void* destination : destinations_)
      kernels::narrow(operation.dtype, static_cast<std::byte*>(destination) + done * sizeof(uint16_t),
                      static_cast<const float*>(sum), length);
    note_overflow(operation, placement_.size, input,
                  static_cast<const std::byte*>(destinations_[0]) + done * sizeof(uint16_t),
                  static_cast<const float*>(sum), length);
  }
}

void InterhostRunner::spread(const View& view, const std::byte* received) const {
  const InterhostCell& cell = view.cell;
  const SpanList& output = view.operation.output;
  if (received) output.copy_from(received, cell.output, cell.bytes);
  if (cell.spreading == Spreading::None || placement_.locals().size() == 1) return;
  auto copy_to = [&](int local) {
    const Runner::Base& to = base(view, local);
    output.for_each(cell.output, cell.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
      std::memcpy(to.at(place(view) + offset), memory, bytes);
    });
  };
  if (cell.spreading == Spreading::OwnSlot) return copy_to(placement_.rank);
  for (int local : placement_.locals())
    if (local != placement_.rank) copy_to(local);
}

}  // namespace syncengine
