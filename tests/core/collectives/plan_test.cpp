// Walks the plans of every collective, path and world with symbols instead of bytes: a symbol says whose contributions
// to which place of the input it holds. What comes out is compared with what the collective means.
#include <algorithm>

#include "collectives/plan.h"
#include "test.h"

namespace syncengine {

namespace {

// Small, so that small blocks take several chunks; a reduce-scatter of 9 ranks still fits.
constexpr size_t kSlot = 640;
constexpr size_t kDirect = 128;

struct Symbol {
  size_t place = 0;
  unsigned ranks = 0;  // 0: nobody wrote this byte yet
  bool scaled = false;
  bool operator==(const Symbol&) const = default;
};

// Memory that remembers who touched what in the present phase. Ranks run a phase at once, so no rank may write what
// another one reads or writes in it.
class Memory {
 public:
  void resize(size_t bytes) {
    symbols_.resize(bytes);
    touched_.resize(bytes);
    writes_.resize(bytes);
  }
  void begin_phase() { std::fill(touched_.begin(), touched_.end(), Touched{}); }
  void set(size_t i, Symbol symbol) { symbols_.at(i) = symbol; }  // before the walk
  Symbol read(int rank, size_t i) {
    Touched& touched = touched_.at(i);
    CHECK(touched.writer == -1 || touched.writer == rank);
    touched.readers |= 1u << rank;
    CHECK(symbols_.at(i).ranks != 0);
    return symbols_[i];
  }
  void write(int rank, size_t i, Symbol symbol) {
    Touched& touched = touched_.at(i);
    CHECK(touched.writer == -1 && (touched.readers & ~(1u << rank)) == 0);
    touched.writer = rank;
    symbols_.at(i) = symbol;
    ++writes_[i];
  }
  unsigned foreign_readers(int owner, size_t i) const { return touched_[i].readers & ~(1u << owner); }
  const Symbol& at(size_t i) const { return symbols_.at(i); }
  int writes(size_t i) const { return writes_[i]; }
  size_t size() const { return symbols_.size(); }

 private:
  struct Touched {
    int writer = -1;
    unsigned readers = 0;
  };
  std::vector<Symbol> symbols_;
  std::vector<Touched> touched_;
  std::vector<int> writes_;
};

class Walk {
 public:
  // The operation as one chunk: each chunk that is walked has a rank, beginning and length of its own.
  explicit Walk(const Chunk& whole)
      : whole_(whole), world_(whole.world), inputs_(world_), outputs_(world_), slots_(world_) {
    const size_t block = whole.block, all = block * world_;
    for (int rank = 0; rank < world_; ++rank) {
      inputs_[rank].resize(whole.collective == Collective::ReduceScatter ? all : block);
      for (size_t i = 0; i < inputs_[rank].size(); ++i) inputs_[rank].set(i, {i, 1u << rank});
      outputs_[rank].resize(whole.collective == Collective::AllGather ? all : block);
    }
  }

  void run() {
    size_t chunk = chunk_bytes(whole_.collective, whole_.path, world_, kSlot, kDirect);
    CHECK(chunk > 0 && chunk % 64 == 0);
    size_t begin = 0;
    do {
      run_chunk(begin, std::min(chunk, whole_.block - begin));
      begin += chunk;
    } while (begin < whole_.block);
    check_results();
  }

 private:
  bool in_place() const {
    return whole_.collective == Collective::AllReduce || whole_.collective == Collective::Broadcast;
  }
  bool direct() const { return whole_.path == Path::Direct; }
  Memory& input(int rank) { return inputs_[rank]; }
  Memory& output(int rank) { return in_place() ? inputs_[rank] : outputs_[rank]; }
  // What `slot` offsets count into.
  Memory& shared(int rank) { return direct() ? inputs_[rank] : slots_[rank]; }

  template <class Body>
  void phase(Body&& body) {
    for (auto* memories : {&inputs_, &outputs_, &slots_})
      for (Memory& memory : *memories) memory.begin_phase();
    for (int rank = 0; rank < world_; ++rank) body(rank, plans_[rank]);
  }

  void run_chunk(size_t begin, size_t length) {
    plans_.assign(world_, {});
    slots_.assign(world_, {});
    for (int rank = 0; rank < world_; ++rank) {
      Chunk chunk = whole_;
      chunk.rank = rank;
      chunk.begin = begin;
      chunk.length = length;
      plan_chunk(chunk, plans_[rank]);
      slots_[rank].resize(kSlot);
    }
    phase([&](int rank, const ChunkPlan& plan) { stage(rank, plan); });
    phase([&](int rank, const ChunkPlan& plan) { reduce(rank, plan); });
    check_readers_are_awaited(false);
    phase([&](int rank, const ChunkPlan& plan) { pull(rank, plan); });
    check_readers_are_awaited(true);
  }

  void stage(int rank, const ChunkPlan& plan) {
    CHECK(!direct() || plan.stage.empty());
    for (const Copy& copy : plan.stage)
      for (size_t i = 0; i < copy.bytes; ++i) {
        Symbol symbol = input(rank).read(rank, copy.user + i);
        symbol.scaled = whole_.stage_all;
        slots_[rank].write(rank, copy.slot + i, symbol);
      }
  }

  void reduce(int rank, const ChunkPlan& plan) {
    if (!plan.reduces) return;
    const Reduce& step = plan.reduce;
    for (size_t i = 0; i < step.bytes; ++i) {
      Symbol result = {.place = step.input + i, .ranks = 0, .scaled = whole_.stage_all};
      for (int peer = 0; peer < world_; ++peer) {
        bool from_user = peer == rank && !step.own_from_slot;
        Symbol part = from_user ? input(rank).read(rank, step.input + i) : shared(peer).read(rank, step.slot + i);
        CHECK(part == (Symbol{step.input + i, 1u << peer, whole_.stage_all}));
        result.ranks |= part.ranks;
      }
      output(rank).write(rank, step.output + i, result);
      if (step.into_own_slot) slots_[rank].write(rank, step.slot + i, result);
      for (int peer = 0; peer < world_ && step.into_peers; ++peer)
        if (peer != rank) shared(peer).write(rank, step.slot + i, result);
    }
  }

  void pull(int rank, const ChunkPlan& plan) {
    CHECK(plan.pulls || plan.pull.empty());
    for (const Pull& step : plan.pull)
      for (size_t i = 0; i < step.bytes; ++i)
        output(rank).write(rank, step.user + i, shared(step.peer).read(rank, step.slot + i));
  }

  // A rank whose memory a peer reads must not end before: it awaits the reduce phase by pulling, the pull phase by
  // asking to.
  void check_readers_are_awaited(bool pulling) {
    for (int rank = 0; rank < world_ && direct(); ++rank) {
      bool awaits = plans_[rank].peers_read_user || (!pulling && plans_[rank].pulls);
      for (size_t i = 0; i < inputs_[rank].size(); ++i) CHECK(awaits || inputs_[rank].foreign_readers(rank, i) == 0);
    }
  }

  Symbol expected(int rank, size_t i) const {
    unsigned everybody = (1u << world_) - 1;
    switch (whole_.collective) {
      case Collective::AllReduce: return {i, everybody, whole_.stage_all};
      case Collective::ReduceScatter: return {rank * whole_.block + i, everybody, whole_.stage_all};
      case Collective::AllGather: return {i % whole_.block, 1u << (i / whole_.block), whole_.stage_all};
      case Collective::Broadcast: return {i, 1u << whole_.root, whole_.stage_all && rank != whole_.root};
      case Collective::Barrier: break;
    }
    return {};
  }

  void check_results() {
    for (int rank = 0; rank < world_; ++rank) {
      Memory& result = output(rank);
      int writes = whole_.collective == Collective::Broadcast && rank == whole_.root ? 0 : 1;
      for (size_t i = 0; i < result.size(); ++i) {
        CHECK(result.at(i) == expected(rank, i));
        CHECK_EQ(result.writes(i), writes);
      }
    }
  }

  const Chunk whole_;
  const int world_;
  std::vector<Memory> inputs_, outputs_, slots_;
  std::vector<ChunkPlan> plans_;
};

constexpr int kMaxWorld = 9;
const std::vector<size_t> kBlocks = {0, 1, 63, 64, 65, 600, 640, 641, 1500};

void walk_all(Collective collective, bool pull_results = false) {
  for (int world = 1; world <= kMaxWorld; ++world) {
    for (Path path : {Path::OneShot, Path::Staged, Path::Direct}) {
      if (pull_results && path == Path::OneShot) continue;
      for (size_t block : kBlocks) {
        for (bool stage_all : {false, true}) {
          if (stage_all && path == Path::Direct) continue;  // scaled contributions are never direct
          for (int root = 0; root < (collective == Collective::Broadcast ? world : 1); ++root)
            Walk({.collective = collective,
                  .path = path,
                  .world = world,
                  .root = root,
                  .block = block,
                  .stage_all = stage_all,
                  .pull_results = pull_results})
                .run();
        }
      }
    }
  }
}

}  // namespace

TEST(plans_of_all_reduce) { walk_all(Collective::AllReduce); }
TEST(plans_of_all_reduce_whose_results_are_pulled) { walk_all(Collective::AllReduce, /*pull_results=*/true); }
TEST(plans_of_reduce_scatter) { walk_all(Collective::ReduceScatter); }
TEST(plans_of_all_gather) { walk_all(Collective::AllGather); }
TEST(plans_of_broadcast) { walk_all(Collective::Broadcast); }

TEST(plan_of_a_barrier_waits_and_moves_nothing) {
  ChunkPlan plan;
  for (int world = 1; world <= kMaxWorld; ++world) {
    plan_chunk({.collective = Collective::Barrier, .path = Path::Staged, .world = world}, plan);
    CHECK(plan.pulls && !plan.reduces && plan.stage.empty() && plan.pull.empty());
  }
}

// docs/memory.md's table: the bytes of a rank that main memory and caches move do not grow with the number of ranks,
// and neither do its waits, in each of which it reads one line of each peer.
TEST(bytes_and_waits_of_an_all_reduce_by_ranks) {
  constexpr size_t kBlock = 32 << 20, kSlotBytes = 256 << 10;
  for (const Path path : {Path::Staged, Path::Direct}) {
    for (const size_t world : {2, 4, 8, 16}) {
      const size_t step = chunk_bytes(Collective::AllReduce, path, static_cast<int>(world), kSlotBytes, 1 << 20);
      size_t copied = 0, read = 0, written = 0, waits = 0;
      for (size_t begin = 0; begin < kBlock; begin += step) {
        ChunkPlan plan;
        plan_chunk({.collective = Collective::AllReduce,
                    .path = path,
                    .rank = 1,
                    .world = static_cast<int>(world),
                    .root = kNoRoot,
                    .block = kBlock,
                    .begin = begin,
                    .length = std::min(step, kBlock - begin)},
                   plan);
        for (const Copy& copy : plan.stage) copied += copy.bytes;
        for (const Pull& pull : plan.pull) copied += pull.bytes;
        read += plan.reduce.bytes * world;
        written += plan.reduce.bytes * (plan.reduce.into_peers ? world : 1);
        waits += plan.reduces + plan.pulls;
      }
      CHECK_EQ(copied, path == Path::Direct ? 0 : 2 * (kBlock - kBlock / world));
      CHECK_EQ(read, kBlock);
      CHECK_EQ(written, kBlock);
      CHECK_EQ(waits, 2 * (kBlock / (path == Path::Direct ? std::min(kBlock, world << 20) : kSlotBytes)));
    }
  }
}

TEST(slices_partition_the_block_on_cache_lines) {
  for (int world = 1; world <= 64; ++world) {
    for (size_t length : {0, 1, 63, 64, 65, 4095, 4096, 262144, 262145}) {
      size_t end = 0;
      for (int rank = 0; rank < world; ++rank) {
        auto [first, second] = slice(length, world, rank);
        CHECK_EQ(first, end);
        CHECK(first <= second && (first % 64 == 0 || first == length));
        end = second;
      }
      CHECK_EQ(end, length);
    }
  }
}

// A plan is refilled for each chunk: nothing of the chunk before may stay.
TEST(a_refilled_plan_forgets_the_last_one) {
  ChunkPlan used, fresh;
  Chunk chunk{.collective = Collective::AllReduce,
              .path = Path::Staged,
              .rank = 1,
              .world = 3,
              .block = 640,
              .length = 640,
              .stage_all = true};
  plan_chunk(chunk, used);
  for (Collective collective :
       {Collective::Broadcast, Collective::AllGather, Collective::ReduceScatter, Collective::Barrier}) {
    chunk.collective = collective;
    plan_chunk(chunk, used);
    fresh = {};
    plan_chunk(chunk, fresh);
    CHECK(used == fresh);
  }
}

}  // namespace syncengine
