#include "cuda/sequence.h"

#include <algorithm>

#include "collectives/runner.h"

namespace syncengine::cuda {

namespace {

// Copies parts of the operation's input to `slot`, scaled. There is no gate, since this uses no peer's bytes.
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

struct Sequence {
  const Operation& operation;
  const Site& site;
  const MemoryRoute& route;
  const uint32_t fingerprint;
  Steps& steps;

  void run() {
    const size_t block = operation.collective == Collective::Barrier ? 0 : block_bytes(operation);
    const size_t chunk = direct() ? std::max<size_t>(block, 1)
                                  : chunk_bytes(operation.collective, route.path, site.world, site.slot_bytes, 0);
    size_t begin = 0;
    do {
      run_chunk(block, begin, std::min(chunk, block - begin));
      begin += chunk;
      half ^= 1;
    } while (begin < block);
    exchange(/*last=*/true);  // peers are done with this rank's memory
  }

  bool direct() const { return route.path == Path::Direct; }

  void run_chunk(size_t block, size_t begin, size_t length) {
    const Chunk chunk{.collective = operation.collective,
                      .path = route.path,
                      .rank = site.rank,
                      .world = site.world,
                      .root = operation.root,
                      .block = block,
                      .begin = begin,
                      .length = length,
                      .stage_all = operation.prescale != 1.0,
                      .pull_results = true};
    plan_chunk(chunk, plan);
    stage(operation, plan.stage, site.slots[site.rank] + half * site.slot_bytes, steps);
    exchange();
    const Reduce& step = plan.reduce;
    if (plan.reduces)
      for_each_run(operation, site.world, step.input, step.output, step.bytes, order,
                   [&](const Run& run) { reduce_run(step, run); });
    // Results are pulled, never pushed into tensors: there, nobody would notice that those of a dead peer are missing.
    if (plan.reduces && plan.pulls) {
      if (!looked) look();
      exchange();
    }
    pull();
    if (!looked) look();
  }

  void exchange(bool last = false) {
    const int next = last ? 2 : set == 0 ? 1 : 0;
    steps.exchange({.set = next, .reset = set, .value = fingerprint, .last = last});
    set = next;
    looked = false;
  }

  Gate gate() const {
    return {.words = site.control->inbox[set],
            .control = site.control,
            .expected = fingerprint,
            .rank = site.rank,
            .world = site.world};
  }

  // Queues a kernel that moves nothing, on a rank with nothing to move, so that fingerprints are compared all the same.
  void look() { steps.copy({.pieces = 0, .gate = gate()}); }

  std::byte* at(int rank, size_t offset) const {
    return direct() ? route.memories[rank].at(offset) : site.slots[rank] + half * site.slot_bytes + offset;
  }

  void reduce_run(const Reduce& step, const Run& run) {
    const size_t element = element_size(operation.dtype);
    ReduceArgs args{.source_count = site.world, .scale = operation.postscale, .gate = gate()};
    looked = true;
    args.count = run.bytes / element;
    for (int i = 0; i < site.world; ++i) {
      const int rank = order[i];
      const bool from_user = rank == site.rank && !step.own_from_slot;
      args.sources[i] = from_user ? run.own : at(rank, step.slot + run.offset);
    }
    args.destinations[args.destination_count++] = run.out;
    if (step.into_own_slot) args.destinations[args.destination_count++] = at(site.rank, step.slot + run.offset);
    const kernels::Reduction reduction{
        .dtype = operation.dtype, .op = operation.op, .rounding = rounding_of(operation.numerics)};
    if (operation.nonfinite) {  // noted before the sum is made, while the contributions are still there
      NoteArgs note{.sum = args, .words = operation.nonfinite->on_device};
      note.first = operation.nonfinite->locate(step.input + run.offset, args.count, element).first;
      for (int i = 0; i < site.world; ++i) note.ranks[i] = static_cast<int8_t>(order[i]);
      steps.note(reduction, note);
    }
    if (operation.numerics == Numerics::Tree && site.world > 1) return reduce_tree(reduction, args, run);
    steps.reduce(reduction, args);
  }

  // Adds two contributions or sums at a time, and overwrites the left one, which only this rank reads until the slice
  // is reduced. If the left one is this rank's input, and not its output, too, the sum goes to the output instead.
  void reduce_tree(const kernels::Reduction& reduction, const ReduceArgs& all, const Run& run) {
    const std::vector<uint8_t>& merges = tree.of(operation.leaves, site.world);
    std::vector<void*> sums;
    for (int i = 0; i < site.world; ++i) {
      sums.push_back(const_cast<void*>(all.sources[i]));
      for (int left = merges[i]; left > 0; --left) {
        ReduceArgs args{.source_count = 2, .destination_count = 1, .count = all.count, .gate = all.gate};
        args.sources[1] = sums.back();
        sums.pop_back();
        args.sources[0] = sums.back();
        if (sums.back() == run.own) sums.back() = run.out;
        args.destinations[0] = sums.back();
        if (i == site.world - 1 && left == 1) {
          args.scale = all.scale;
          args.destination_count = all.destination_count;
          std::copy_n(all.destinations, all.destination_count, args.destinations);
        }
        steps.reduce(reduction, args);
      }
    }
  }

  void pull() {
    Copies copies(steps, gate());
    for (const Pull& step : plan.pull) {
      operation.output.for_each(step.user, step.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
        // Peers' spans have the same lengths as this rank's, so a run of this tensor is one run of theirs. But an
        // all-gather's input has other spans than its output, so that a run here may be several there.
        if (!direct()) return copies.add(memory, at(step.peer, step.slot + offset), bytes);
        route.memories[step.peer].for_each(step.slot + offset, bytes,
                                           [&](std::byte* source, size_t skip, size_t length) {
                                             if (memory + skip != source) copies.add(memory + skip, source, length);
                                           });
      });
    }
    looked |= copies.flush();
  }

  ChunkPlan plan = {};
  std::vector<int> order = {};
  TreeMerges tree = {};
  int set = -1, half = 0;  // of the latest exchange; of the staging memory
  bool looked = false;     // whether a kernel behind that exchange compares its fingerprints
};

void run_in_kernel(const Operation& operation, const Site& site, Path path, uint32_t fingerprint, Steps& steps) {
  InKernelArgs args{.control = site.control,
                    .input = operation.input.at(0),
                    .output = operation.output.at(0),
                    .bytes = operation.input.bytes(),
                    .scale = operation.postscale,
                    .fingerprint = fingerprint,
                    .rank = site.rank,
                    .world = site.world,
                    .shots = path == Path::OneShot ? 1 : 2};
  std::copy(site.areas.begin(), site.areas.end(), args.areas);
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
  Sequence{operation, site, route, fingerprint, steps}.run();
}

}  // namespace syncengine::cuda
