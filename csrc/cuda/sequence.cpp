#include "cuda/sequence.h"

#include <algorithm>

#include "collectives/runner.h"

namespace syncengine::cuda {

namespace {

// Copies parts of the operation's input to `slot`, scaled. No peer has had a say in it yet, so there is no gate.
void stage(const Operation& operation, const std::vector<Copy>& parts, std::byte* slot, Steps& steps) {
  Copies copies(steps);
  for (const Copy& part : parts)
    operation.input.for_each(part.user, part.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
      std::byte* to = slot + part.slot + offset;
      if (operation.prescale == 1.0) return copies.add(to, memory, bytes);
      ReduceArgs args{.source_count = 1, .destination_count = 1, .scale = operation.prescale};
      args.count = bytes / element_size(operation.dtype);
      args.sources[0] = memory;
      args.destinations[0] = to;
      steps.reduce({.dtype = operation.dtype, .op = ReduceOp::Sum}, args);
    });
  copies.flush();
}

class Sequence {
 public:
  Sequence(const Operation& operation, const Site& site, const MemoryRoute& route, uint32_t fingerprint, Steps& steps)
      : operation_(operation), site_(site), route_(route), fingerprint_(fingerprint), steps_(steps) {}

  void run() {
    const size_t block = operation_.collective == Collective::Barrier ? 0 : block_bytes(operation_);
    const size_t chunk = direct() ? std::max<size_t>(block, 1)
                                  : chunk_bytes(operation_.collective, route_.path, site_.world, site_.slot_bytes, 0);
    size_t begin = 0;
    do {
      run_chunk(block, begin, std::min(chunk, block - begin));
      begin += chunk;
      half_ ^= 1;
    } while (begin < block);
    exchange(2, /*last=*/true);  // peers are done with this rank's memory
  }

 private:
  bool direct() const { return route_.path == Path::Direct; }

  void run_chunk(size_t block, size_t begin, size_t length) {
    const Chunk chunk{.collective = operation_.collective,
                      .path = route_.path,
                      .rank = site_.rank,
                      .world = site_.world,
                      .root = operation_.root,
                      .element = element_size(operation_.dtype),
                      .block = block,
                      .begin = begin,
                      .length = length,
                      .stage_all = operation_.prescale != 1.0,
                      .pull_results = true};
    plan_chunk(chunk, plan_);
    stage(operation_, plan_.stage, site_.slots[site_.rank] + half_ * site_.slot_bytes, steps_);
    exchange(next_set(), false);
    looked_ = false;
    if (plan_.reduces) reduce();
    // Results are never pushed straight into tensors: there, missing results of a peer that has died would go
    // unnoticed.
    if (plan_.reduces && plan_.pulls) {
      if (!looked_) look();
      exchange(next_set(), false);
      looked_ = false;
    }
    pull();
    if (!looked_) look();
  }

  int next_set() { return set_ == 0 ? 1 : 0; }

  void exchange(int set, bool last) {
    steps_.exchange({.set = set, .reset = set_, .value = fingerprint_, .last = last});
    set_ = set;
  }

  Gate gate() const {
    return {.words = site_.control->inbox[set_],
            .control = site_.control,
            .expected = fingerprint_,
            .rank = site_.rank,
            .world = site_.world};
  }

  // Queues a kernel that moves nothing, on a rank with nothing to move, so that fingerprints are compared all the same.
  void look() { steps_.copy({.pieces = 0, .gate = gate()}); }

  std::byte* at(int rank, size_t offset) const {
    return direct() ? route_.memories[rank].at(offset) : site_.slots[rank] + half_ * site_.slot_bytes + offset;
  }

  void reduce() {
    const Reduce& step = plan_.reduce;
    for_each_run(operation_, site_.world, step.input, step.output, step.bytes, order_,
                 [&](const Run& run) { reduce_run(step, run); });
  }

  void reduce_run(const Reduce& step, const Run& run) {
    ReduceArgs args{.source_count = site_.world, .scale = operation_.postscale, .gate = gate()};
    looked_ = true;
    args.count = run.bytes / element_size(operation_.dtype);
    for (int i = 0; i < site_.world; ++i) {
      const int rank = order_[i];
      const bool from_user = rank == site_.rank && !step.own_from_slot;
      args.sources[i] = from_user ? run.own : at(rank, step.slot + run.offset);
    }
    args.destinations[args.destination_count++] = run.out;
    if (step.into_own_slot) args.destinations[args.destination_count++] = at(site_.rank, step.slot + run.offset);
    const kernels::Reduction reduction{
        .dtype = operation_.dtype, .op = operation_.op, .rounding = rounding_of(operation_.numerics)};
    if (operation_.nonfinite) note(reduction, args, step.input + run.offset);
    if (operation_.numerics == Numerics::Tree && site_.world > 1) return reduce_tree(reduction, args, run);
    steps_.reduce(reduction, args);
  }

  // Sums of two at a time, each in the place of its left one: nobody but the rank that owns this slice reads it there
  // until the slice is reduced. An input that is not the output, too, stays as it is.
  void reduce_tree(const kernels::Reduction& reduction, const ReduceArgs& all, const Run& run) {
    const std::vector<uint8_t>& merges = tree_.of(operation_.leaves, site_.world);
    std::vector<void*> sums;
    for (int i = 0; i < site_.world; ++i) {
      sums.push_back(const_cast<void*>(all.sources[i]));
      for (int left = merges[i]; left > 0; --left) {
        ReduceArgs args{.source_count = 2, .destination_count = 1, .count = all.count, .gate = all.gate};
        args.sources[1] = sums.back();
        sums.pop_back();
        args.sources[0] = sums.back();
        if (sums.back() == run.own) sums.back() = run.out;
        args.destinations[0] = sums.back();
        if (i == site_.world - 1 && left == 1) {
          args.scale = all.scale;
          args.destination_count = all.destination_count;
          std::copy_n(all.destinations, all.destination_count, args.destinations);
        }
        steps_.reduce(reduction, args);
      }
    }
  }

  // Notes NaN and infinity before the sum is made, while the contributions are still there.
  void note(const kernels::Reduction& reduction, const ReduceArgs& sum, size_t input) {
    const size_t element = element_size(operation_.dtype);
    NoteArgs args{.sum = sum, .words = operation_.nonfinite->on_device};
    args.first = operation_.nonfinite->locate(input, sum.count * element, element).first;
    for (int i = 0; i < site_.world; ++i) args.ranks[i] = static_cast<int8_t>(order_[i]);
    steps_.note(reduction, args);
  }

  void pull() {
    Copies copies(steps_, gate());
    for (const Pull& step : plan_.pull) {
      operation_.output.for_each(step.user, step.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
        // Peers' spans have the same lengths as this rank's, so what is contiguous here is contiguous there. An
        // all-gather's input is cut otherwise than its output, however.
        if (!direct()) return copies.add(memory, at(step.peer, step.slot + offset), bytes);
        route_.memories[step.peer].for_each(step.slot + offset, bytes,
                                            [&](std::byte* source, size_t skip, size_t length) {
                                              if (memory + skip != source) copies.add(memory + skip, source, length);
                                            });
      });
    }
    looked_ |= copies.flush();
  }

  const Operation& operation_;
  const Site& site_;
  const MemoryRoute& route_;
  const uint32_t fingerprint_;
  Steps& steps_;
  ChunkPlan plan_;
  std::vector<int> order_;
  TreeMerges tree_;
  int set_ = -1, half_ = 0;
  bool looked_ = false;
};

void run_in_kernel(const Operation& operation, const Site& site, Path path, uint32_t fingerprint, Steps& steps) {
  InKernelArgs args{};
  std::copy(site.areas.begin(), site.areas.end(), args.areas);
  args.control = site.control;
  args.input = operation.input.at(0);
  args.output = operation.output.at(0);
  args.bytes = operation.input.bytes();
  args.scale = operation.postscale;
  args.fingerprint = fingerprint;
  args.rank = site.rank;
  args.world = site.world;
  args.shots = path == Path::OneShot ? 1 : 2;
  steps.in_kernel({.dtype = operation.dtype, .op = operation.op}, args);
}

}  // namespace

uint32_t fingerprint(const Operation& operation, Path path, uint64_t place) {
  uint64_t hash = 0xcbf29ce484222325;
  for (uint64_t value :
       {static_cast<uint64_t>(operation.collective), static_cast<uint64_t>(operation.dtype),
        static_cast<uint64_t>(operation.op), static_cast<uint64_t>(operation.numerics), uint64_t{operation.leaves},
        static_cast<uint64_t>(operation.root), static_cast<uint64_t>(path),
        static_cast<uint64_t>(operation.input.bytes()), static_cast<uint64_t>(operation.output.bytes()),
        operation.layout_hash, place, kernels::bits_as<uint64_t>(operation.prescale),
        kernels::bits_as<uint64_t>(operation.postscale)})
    hash = mix(hash, value);
  if (path == Path::Direct)
    for (const Span& span : operation.input.spans()) hash = mix(hash, span.bytes);
  return (static_cast<uint32_t>(hash ^ (hash >> 32)) | kArrived) & ~1u;
}

bool fits_one_kernel(const Operation& operation, const Site& site, const MemoryRoute& route) {
  const size_t most = route.path == Path::OneShot ? kOneShotBytes : route.path == Path::Staged ? kTwoShotBytes : 0;
  return operation.input.bytes() <= most && operation.collective == Collective::AllReduce && !site.areas.empty() &&
         (operation.op == ReduceOp::Sum || operation.op == ReduceOp::Avg) && is_floating(operation.dtype) &&
         rounding_of(operation.numerics) == kernels::Rounding::Once && operation.prescale == 1.0 &&
         !operation.nonfinite && operation.input.spans().size() == 1;
}

void run_sequence(const Operation& operation, const Site& site, const MemoryRoute& route, uint32_t fingerprint,
                  Steps& steps) {
  if (fits_one_kernel(operation, site, route)) return run_in_kernel(operation, site, route.path, fingerprint, steps);
  Sequence(operation, site, route, fingerprint, steps).run();
}

}  // namespace syncengine::cuda
