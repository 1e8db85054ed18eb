#include "collectives/runner.h"

#include <cstring>

#include "kernels/reduce.h"

namespace syncengine {

namespace {

constexpr size_t kWidePiece = 4096;  // elements that are widened at a time: they stay in the cache

}  // namespace

const std::byte* InterhostRunner::contribution(const View& view, int rank,
                                               const std::function<std::byte*()>& room) const {
  const InterhostCell& cell = view.cell;
  if (!in_slot(view, rank)) return view.operation.input.readable(cell.input, cell.bytes, room);
  const Runner::Base& from = base(view, rank);
  return from.spans ? from.spans->readable(place(view), cell.bytes, room) : from.slot + place(view);
}

std::byte* InterhostRunner::output(const View& view) const {
  return view.operation.output.one_piece(view.cell.output, view.cell.bytes);
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
    size_t merges = 0;
    if (rank >= 0 || step.receives[received].content == Content::Raw) {
      merges = of_ranks[rank >= 0 ? rank : step.receives[received].rank];
    } else {
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
    const bool is_raw = source.rank < 0 && step.receives[source.received].content == Content::Raw;
    ranks_.push_back(is_raw ? step.receives[source.received].rank : source.rank);
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

// Adds 16-bit floats in float32: the same additions as in one kernel call, but with float32 partial sums on the way in
// or out.
void InterhostRunner::fold_wide(const View& view, size_t offset, size_t bytes, std::byte* partial) {
  const Operation& operation = view.operation;
  size_t count = bytes / sizeof(uint16_t), sources = sources_.size();
  floats_.resize((sources + 1) * kWidePiece);
  std::vector<const void*> wide(sources);
  for (size_t done = 0; done < count; done += kWidePiece) {
    size_t length = std::min(kWidePiece, count - done);
    for (size_t i = 0; i < sources; ++i) {
      auto* source = static_cast<const std::byte*>(sources_[i]);
      if (is_wide_[i]) {
        wide[i] = source + done * sizeof(float);
        continue;
      }
      float* copy = floats_.data() + i * kWidePiece;
      kernels::widen(operation.dtype, copy, source + done * sizeof(uint16_t), length);
      wide[i] = copy;
    }
    void* sum = partial ? static_cast<std::byte*>(destinations_[0]) + done * sizeof(float)
                        : static_cast<void*>(floats_.data() + sources * kWidePiece);
    kernels::Reduction reduction{DType::Float32, operation.op, kernels::Rounding::Once,
                                 partial ? 1.0 : operation.postscale};
    const size_t input = view.cell.input + offset + done * sizeof(uint16_t);
    reduce_noting(operation, placement_.size, input, reduction, wide.data(), ranks_.data(), static_cast<int>(sources),
                  &sum, 1, length);
    for (void* destination : destinations_) {
      if (partial) break;
      kernels::narrow(operation.dtype, static_cast<std::byte*>(destination) + done * sizeof(uint16_t),
                      static_cast<const float*>(sum), length);
    }
    if (!partial)
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
