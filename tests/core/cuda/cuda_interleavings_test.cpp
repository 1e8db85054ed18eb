// Walks all interleavings of the steps of a few GPU ranks: nobody waits for ever, no signal is lost, no kernel touches
// memory that another running one writes, and all words end as they began. So the order of eager calls and replays does
// not matter: each collective begins from nothing but zeros.
#include <set>
#include <string>
#include <vector>

#include "cuda/sequence.h"
#include "cuda_twin.h"
#include "test.h"

namespace syncengine {

namespace {

struct Touched {
  const void* data;
  size_t bytes;
  bool writes;
  bool meets(const Touched& other) const {
    auto a = static_cast<const char*>(data), b = static_cast<const char*>(other.data);
    return (writes || other.writes) && a < b + other.bytes && b < a + bytes;
  }
};

// A stream's operations one by one: a kernel takes two, for others run between its beginning and its end.
struct Action {
  enum Kind { Reset, Signal, Wait, Mark, Look, Begin, End } kind;
  int set = 0, peer = 0, call = 0;  // of Mark and Look, the set is a half and a shot
  std::vector<Touched> ranges = {};
};

class Recorder : public cuda::Steps {
 public:
  Recorder(int rank, int world) : rank_(rank), world_(world) {}
  std::vector<Action> actions;

  void exchange(const cuda::WordExchange& exchange) override {
    if (exchange.reset >= 0) with_peers(Action::Reset, exchange.reset);
    with_peers(Action::Signal, exchange.set);
    with_peers(Action::Wait, exchange.set);
    if (exchange.last) with_peers(Action::Reset, exchange.set);
  }
  void reduce(const kernels::Reduction& reduction, const cuda::ReduceArgs& args) override {
    std::vector<Touched> ranges;
    const size_t bytes = args.count * element_size(reduction.dtype);
    for (int s = 0; s < args.source_count; ++s) ranges.push_back({args.sources[s], bytes, false});
    for (int d = 0; d < args.destination_count; ++d) ranges.push_back({args.destinations[d], bytes, true});
    kernel(std::move(ranges));
  }
  void note(const kernels::Reduction&, const cuda::NoteArgs&) override {}  // reads what the reduction does
  void copy(const cuda::CopyArgs& args) override {
    std::vector<Touched> ranges;
    for (int i = 0; i < args.pieces; ++i) {
      ranges.push_back({args.sources[i], args.bytes[i], false});
      ranges.push_back({args.destinations[i], args.bytes[i], true});
    }
    if (args.pieces) kernel(std::move(ranges));
  }
  // Records a call as one block, with a kernel for each part of the call between its waits.
  void in_kernel(const kernels::Reduction&, const cuda::InKernelArgs& args) override {
    const uint32_t half = ++calls_ & 1;
    auto* output = static_cast<const std::byte*>(args.output);
    auto slot = [&](int rank, cuda::ByteRun run, bool writes) {
      return Touched{args.areas[rank]->slots[half] + run.begin, run.bytes, writes};
    };
    kernel({{args.input, args.bytes, false}, slot(rank_, {0, args.bytes}, true)});
    meet(2 * half);
    const cuda::ByteRun all{0, args.bytes}, run = args.shots == 1 ? all : cuda::piece_of(all, rank_, world_);
    std::vector<Touched> ranges{{output + run.begin, run.bytes, true}};
    for (int rank = 0; rank < world_; ++rank) ranges.push_back(slot(rank, run, rank == rank_ && args.shots == 2));
    kernel(std::move(ranges));
    if (args.shots == 1) return;
    meet(2 * half + 1);
    ranges.clear();
    for (int peer = 0; peer < world_; ++peer) {
      const cuda::ByteRun theirs = cuda::piece_of(all, peer, world_);
      if (peer == rank_) continue;
      ranges.push_back(slot(peer, theirs, false));
      ranges.push_back({output + theirs.begin, theirs.bytes, true});
    }
    kernel(std::move(ranges));
  }
  void kernel(std::vector<Touched> ranges) {
    actions.push_back({.kind = Action::Begin, .ranges = std::move(ranges)});
    actions.push_back({.kind = Action::End});
  }

 private:
  void with_peers(Action::Kind kind, int set) {
    for (int peer = 0; peer < world_; ++peer)
      if (peer != rank_) actions.push_back({.kind = kind, .set = set, .peer = peer, .call = calls_});
  }
  void meet(int set) {
    with_peers(Action::Mark, set);
    with_peers(Action::Look, set);
  }
  int rank_, world_, calls_ = 0;
};

class Explorer {
 public:
  explicit Explorer(std::vector<std::vector<Action>> programs)
      : programs_(std::move(programs)), world_(programs_.size()) {}

  // The number of different states. Throws at the first bad one.
  size_t explore() {
    std::vector<State> open{State(world_ + (cuda::kSets + kMarks) * world_ * world_, '\0')};
    seen_.insert(open[0]);
    while (!open.empty()) {
      State state = std::move(open.back());
      open.pop_back();
      bool moved = false, ended = true;
      for (size_t rank = 0; rank < world_; ++rank) {
        if (at(state, rank) == programs_[rank].size()) continue;
        ended = false;
        State next = state;
        if (!act(next, rank)) continue;
        moved = true;
        if (seen_.insert(next).second) open.push_back(std::move(next));
      }
      CHECK(moved || ended);  // else everybody waits
      if (ended)
        for (size_t i = world_; i < world_ + cuda::kSets * world_ * world_; ++i) CHECK(state[i] == 0);
    }
    return seen_.size();
  }

 private:
  static constexpr int kMarks = 4;  // halves and shots
  using State = std::string;        // where each rank is, then the words and the marks, by set

  size_t at(const State& state, size_t rank) const { return static_cast<unsigned char>(state[rank]); }
  char& word(State& state, size_t owner, int set, size_t peer) const {
    return state[world_ + (set * world_ + owner) * world_ + peer];
  }

  // False if it has to wait.
  bool act(State& state, size_t rank) const {
    const Action& action = programs_[rank][at(state, rank)];
    switch (action.kind) {
      case Action::Signal: {
        char& theirs = word(state, action.peer, action.set, rank);
        CHECK(theirs == 0);  // else a signal is lost
        theirs = 1;
        break;
      }
      case Action::Wait:
        if (!word(state, rank, action.set, action.peer)) return false;
        break;
      case Action::Mark:
        word(state, action.peer, cuda::kSets + action.set, rank) = static_cast<char>(action.call);
        break;
      case Action::Look:
        if (word(state, rank, cuda::kSets + action.set, action.peer) != action.call) return false;
        break;
      case Action::Reset: word(state, rank, action.set, action.peer) = 0; break;
      case Action::Begin: check_alone(state, rank, action); break;
      case Action::End: break;
    }
    ++state[rank];
    return true;
  }

  void check_alone(const State& state, size_t rank, const Action& action) const {
    for (size_t other = 0; other < world_; ++other) {
      if (other == rank || at(state, other) == 0 || at(state, other) == programs_[other].size()) continue;
      const Action& running = programs_[other][at(state, other) - 1];
      if (programs_[other][at(state, other)].kind != Action::End) continue;
      for (const Touched& a : action.ranges)
        for (const Touched& b : running.ranges) CHECK(!a.meets(b));
    }
  }

  std::vector<std::vector<Action>> programs_;
  size_t world_;
  std::set<State> seen_;
};

struct Call {
  Collective collective;
  Path path;
  size_t bytes = 256;
  bool in_kernel = false;
};

// `calls` one after the other on every rank; between them each rank's program writes its tensor.
void explore(int world, const std::vector<Call>& calls) {
  constexpr size_t kSlot = 128, kTensor = 4096;
  std::vector<std::vector<std::byte>> inputs(world, std::vector<std::byte>(kTensor)), outputs = inputs;
  const testing::TwinGroup group(world, kSlot, /*one_kernel=*/true);
  std::vector<std::vector<Action>> programs;
  for (int rank = 0; rank < world; ++rank) {
    Recorder recorder(rank, world);
    for (const Call& call : calls) {
      cuda::Site site = group.site(rank);
      if (!call.in_kernel) site.areas.clear();
      Operation operation;
      operation.collective = call.collective;
      if (call.collective == Collective::Broadcast) operation.root = 0;
      bool in_place = call.collective == Collective::AllReduce || call.collective == Collective::Broadcast;
      if (call.collective != Collective::Barrier) {
        operation.input = {inputs[rank].data(),
                           call.bytes * (call.collective == Collective::ReduceScatter ? world : 1)};
        operation.output = in_place ? operation.input
                                    : SpanList(outputs[rank].data(),
                                               call.bytes * (call.collective == Collective::AllGather ? world : 1));
      }
      cuda::MemoryRoute route{.path = call.path};
      for (int peer = 0; peer < world; ++peer)
        route.memories.emplace_back(inputs[peer].data(), operation.input.bytes());
      recorder.kernel({{inputs[rank].data(), kTensor, true}, {outputs[rank].data(), kTensor, true}});
      cuda::run_sequence(operation, site, route, cuda::fingerprint(operation, call.path, 0), recorder);
    }
    recorder.kernel({{inputs[rank].data(), kTensor, true}, {outputs[rank].data(), kTensor, true}});
    CHECK(recorder.actions.size() < 256);
    programs.push_back(std::move(recorder.actions));
  }
  CHECK(Explorer(std::move(programs)).explore() > 10);
}

constexpr Call kBarrier{Collective::Barrier, Path::Staged};
constexpr Call kOneShot{Collective::AllReduce, Path::OneShot, 64, true};
constexpr Call kTwoShot{Collective::AllReduce, Path::Staged, 64, true};
constexpr Call kCalls[] = {
    {Collective::AllReduce, Path::Staged},
    {Collective::AllReduce, Path::OneShot, 64},
    {Collective::AllReduce, Path::Direct},
    {Collective::Broadcast, Path::Staged},
    {Collective::Broadcast, Path::Direct},
    {Collective::AllGather, Path::Staged},
    {Collective::AllGather, Path::Direct},
    {Collective::ReduceScatter, Path::Staged},
    {Collective::ReduceScatter, Path::Direct},
    kBarrier,
    {Collective::AllReduce, Path::Staged, 4},
    {Collective::AllReduce, Path::Direct, 0},
    kOneShot,
    kTwoShot,
};

}  // namespace

TEST(cuda_interleavings_of_any_two_collectives) {
  for (const Call& first : kCalls)
    for (const Call& second : kCalls) explore(2, {first, second});
}

TEST(cuda_interleavings_of_three_collectives) {
  explore(2, {{Collective::AllReduce, Path::Staged, 384}, kBarrier, kCalls[2]});
  explore(2, {kBarrier, kBarrier, kBarrier});
  for (const Call& first : {kOneShot, kTwoShot})
    for (const Call& second : {kOneShot, kTwoShot})
      for (const Call& third : {kOneShot, kTwoShot}) explore(2, {first, second, third, kTwoShot});
}

TEST(cuda_interleavings_of_three_ranks) {
  if (testing::kSlowdown > 1) return;  // AddressSanitizer takes minutes for them, and adds nothing
  explore(3, {{Collective::AllReduce, Path::Direct, 192}});
  explore(3, {kBarrier, kBarrier});
  explore(3, {kTwoShot, kOneShot, kTwoShot});
}

// The walk finds what it is there for: exchanges that use one set twice in a row lose a signal.
TEST(cuda_interleavings_find_a_lost_signal) {
  std::vector<std::vector<Action>> programs;
  for (int rank = 0; rank < 2; ++rank) {
    Recorder recorder(rank, 2);
    for (int call = 0; call < 2; ++call)
      recorder.exchange({.set = 0, .reset = -1, .value = cuda::kArrived, .last = true});
    programs.push_back(recorder.actions);
  }
  CHECK(testing::fails([&] { Explorer(programs).explore(); }));
}

}  // namespace syncengine
