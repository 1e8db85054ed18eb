#include "engine/lanes/lane.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/sync_point.h"
#include "base/trace.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

namespace {

static_assert(shm::kFlagWords == kMaxFlagWords);

constexpr size_t kOneShotBytes = 1 << 10;  // up to this size, one exchange beats reading less
constexpr size_t kDirectBytes = 1 << 20;   // of a rank's slice: after so many bytes a direct operation looks around

Path wanted_path(Algorithm algorithm, const Operation& operation, bool in_arena) {
  bool small = operation.collective == Collective::AllReduce && operation.input.bytes() <= kOneShotBytes;
  switch (algorithm) {
    case Algorithm::OneShot: return Path::OneShot;
    case Algorithm::Staged: return Path::Staged;
    case Algorithm::Direct: return in_arena ? Path::Direct : Path::Staged;
    case Algorithm::Auto: return small ? Path::OneShot : in_arena ? Path::Direct : Path::Staged;
  }
  return Path::Staged;
}

// Whether the two operations must keep their order, since one writes memory that the other uses.
bool collide(const Operation& a, const Operation& b) {
  return a.output.overlaps(b.output) || a.output.overlaps(b.input) || a.input.overlaps(b.output);
}

}  // namespace

Lane::Lane(const Group& group, int id, Algorithm algorithm, Trash& trash, const MakeExchange& make_exchange)
    : state_(group, id),
      algorithm_(algorithm),
      trash_(trash),
      exchange_(make_exchange ? make_exchange(state_) : nullptr) {}

void Lane::enqueue(Item item) {
  state_.queue.push_back(std::move(item));
  if (state_.queue.size() == 1) await_memory();
}

// Finds the last open operation whose memory the next call of the program uses, and which must end first. Announced
// operations need no such check: buckets of a plan never overlap.
void Lane::await_memory() {
  state_.opens_after = 0;
  if (state_.queue.empty() || state_.queue.front().key != kNoKey) return;
  for (size_t i = state_.active.size(); i > 0 && state_.opens_after == 0; --i)
    if (collide(state_.active[i - 1].item.operation, state_.queue.front().operation))
      state_.opens_after = state_.retired + i;
}

void Lane::call(Item item) {
  auto& called = state_.own().called;
  called.store(called.load(std::memory_order_relaxed) + 1, std::memory_order_release);  // relaxed: its only writer
  if (trace::is_on()) trace_announced(state_.group, item);
  enqueue(std::move(item));
}

void trace_announced(const Group& group, const LaneState::Item& item) {
  const Work::Place& place = item.work->place;
  const int64_t at = trace::at(item.since);
  trace_operation(trace::Kind::Announced, at, at, group, place, item.operation.output.bytes(),
                  place.lane == shm::kUserLane ? trace::text(name(item.operation.collective)) : 0);
}

bool Lane::advance(size_t budget) {
  state_.moved_bytes = 0;
  bool moved = false, again = true;
  while (again && state_.moved_bytes <= budget) {
    // The oldest chunks come first, since pulling a chunk frees its slot.
    again = pull_one();
    again |= reduce_one();
    again |= stage_one();
    again |= retire();
    again |= open();
    moved |= again;
  }
  return moved;
}

// Publishes where this rank's spans lie in its arena. Returns OpRecord::spans: -1 if peers can't use the spans in
// place, since these lie elsewhere or are too many, or since contributions are scaled first.
int64_t Lane::publish_spans(const Operation& operation, uint64_t number) {
  const auto& spans = operation.input.spans();
  if (spans.empty() || spans.size() > shm::kMaxSpans || operation.prescale != 1.0) return -1;
  if (spans.size() > 1 && operation.collective != Collective::AllReduce) return -1;
  int64_t* offsets = state_.group.own().lanes[state_.id].span_offsets[number % shm::kRecords];
  for (const Span& span : spans) {
    *offsets = state_.group.arena->offset_of(span.data, span.bytes);
    if (*offsets++ < 0) return -1;
  }
  if (spans.size() == 1) return 1;  // the record has its length
  uint64_t hash = spans.size();
  for (const Span& span : spans) hash = mix(hash, span.bytes);
  return static_cast<int64_t>(hash >> 1);
}

// The spans of `member`, at the offsets that it has published. Bounds are checked here; lengths have been compared
// before.
SpanList Lane::spans_of(int member, uint64_t operation, const Operation& asked) const {
  if (member == state_.group.rank) return asked.input;
  const int64_t* offsets = state_.group.block(member).lanes[state_.id].span_offsets[operation % shm::kRecords];
  SpanList spans;
  for (const Span& own : asked.input.spans()) {
    const auto offset = static_cast<uint64_t>(load_once(*offsets++));
    spans.add(state_.group.memory(member, offset, own.bytes, element_size(asked.dtype)), own.bytes);
  }
  return spans;
}

bool Lane::open() {
  if (!steps_.has_open() || steps_.open_blockers(false)) return false;
  Active active{.item = std::move(state_.queue.front()), .in_arena = false, .spans = {}};
  state_.queue.pop_front();
  const Operation& operation = active.item.operation;
  const int64_t spans = publish_spans(operation, state_.opened);
  active.in_arena = spans >= 0;
  std::copy_n(operation.flags, operation.flag_words,
              state_.group.own().lanes[state_.id].flags[state_.opened % shm::kRecords]);
  state_.noted(state_.group.rank, state_.opened).store(0, std::memory_order_relaxed);
  state_.record(state_.group.rank, state_.opened) = record_of(operation, active.item.key, spans);
  if (trace::is_on()) active.opened = trace::now();
  state_.active.push_back(std::move(active));
  state_.own().opened.store(++state_.opened, std::memory_order_release);  // release: the record is complete
  await_memory();
  sync_point("opened");
  if (exchange_) exchange_->on_opened(state_.opened - 1);
  return true;
}

// All ranks choose the same path, since it follows from what all have published.
bool Lane::choose_path(uint64_t operation, Active& active) {
  if (active.path_known) return true;
  const Operation& asked = active.item.operation;
  active.path = exchange_ ? exchange_->wanted_path(active) : wanted_path(algorithm_, asked, active.in_arena);
  if (active.path == Path::Direct && !find_peers_spans(operation, active)) return false;
  active.chunk_bytes =
      exchange_ ? exchange_->chunk_bytes(active)
                : chunk_bytes(asked.collective, active.path, state_.group.size, state_.slot_bytes, kDirectBytes);
  size_t block = block_bytes(asked);
  active.chunks = std::max<uint64_t>(1, (block + active.chunk_bytes - 1) / active.chunk_bytes);
  active.end = state_.staged.total + active.chunks;
  active.path_known = true;
  prepare(active, {operation, 0, state_.staged.total});
  active.reduces = plan_.reduces;
  active.pulls = plan_.pulls;
  active.peers_read_user = plan_.peers_read_user;
  auto& bytes = active.path == Path::Direct    ? state_.counters.direct_bytes
                : active.path == Path::OneShot ? state_.counters.one_shot_bytes
                                               : state_.counters.staged_bytes;
  bytes += asked.input.bytes();
  return true;
}

// Finds the spans of all ranks; the path is staged unless each has all of them in its arena. Returns false while that
// is not known.
bool Lane::find_peers_spans(uint64_t operation, Active& active) {
  const Operation& asked = active.item.operation;
  if (state_.group.size == 1) {
    active.spans = {asked.input};
    return true;
  }
  if (steps_.stage_blockers(false)) return false;
  compare(operation, active);
  const int64_t own = load_once(state_.record(state_.group.rank, operation).spans);
  for (int member = 0; member < state_.group.size && active.path == Path::Direct; ++member) {
    const int64_t spans = load_once(state_.record(member, operation).spans);
    if (spans < 0)
      active.path = Path::Staged;
    else if (spans != own)
      throw Error(ErrorKind::Mismatch, state_.group.name(member) + " has " + describe(asked) + " in other pieces");
    else
      active.spans.push_back(spans_of(member, operation, asked));
  }
  return true;
}

// Plans the chunk at `cursor` into plan_, points the runner at all ranks' memory for it, and returns its size in bytes.
size_t Lane::prepare(const Active& active, const Cursor& cursor) {
  const Operation& operation = active.item.operation;
  size_t block = block_bytes(operation);
  size_t begin = cursor.chunk * active.chunk_bytes;
  Chunk chunk{.collective = operation.collective,
              .path = active.path,
              .rank = state_.group.rank,
              .world = state_.group.size,
              .root = operation.root,
              .block = block,
              .begin = begin,
              .length = std::min(block - begin, active.chunk_bytes),
              .stage_all = operation.prescale != 1.0};
  if (exchange_)
    exchange_->plan(chunk, plan_);
  else
    plan_chunk(chunk, plan_);
  state_.point_bases(active, cursor.total);
  return chunk.length;
}

void Lane::step(Cursor& cursor, LaneState::Field field, const char* point) {
  const Active& active = state_.at(cursor.operation);
  cursor.advance(active);
  (state_.own().*field).store(cursor.total, std::memory_order_release);  // release: the bytes before the count
  sync_point(point);
  if (active.chunk_bytes > kOneShotBytes) state_.group.bell->ring_interested();  // others: at the end of the pass
}

bool Lane::stage_one() {
  if (state_.staged.operation == state_.opened) return false;
  Active& active = state_.at(state_.staged.operation);
  if (!choose_path(state_.staged.operation, active) || !steps_.has_slot() || steps_.stage_blockers(false)) return false;
  if (state_.takes_slot(active)) {
    state_.moved_bytes += prepare(active, state_.staged);
    state_.runner.stage(active.item.operation, plan_);
  }
  step(state_.staged, &shm::LaneProgress::staged, "staged");
  return true;
}

bool Lane::reduce_one() {
  if (exchange_) {
    bool moved = exchange_->advance();
    if (!exchange_->has_arrived(state_.reduced.total)) return moved;
    step(state_.reduced, &shm::LaneProgress::reduced, "reduced");
    return true;
  }
  if (!steps_.has_reduce() || steps_.reduce_blockers(false)) return false;
  Active& active = state_.at(state_.reduced.operation);
  if (active.reduces) {
    compare(state_.reduced.operation, active);
    state_.moved_bytes += prepare(active, state_.reduced);
    sync_point("reducing");
    auto cut_off = [this] { return state_.is_cut_off(state_.reduced.operation); };
    if (!state_.runner.reduce(active.item.operation, plan_, cut_off)) return false;
    const auto* nonfinite = active.item.operation.nonfinite.get();
    if (nonfinite && nonfinite->anywhere && *nonfinite->anywhere)
      state_.noted(state_.group.rank, state_.reduced.operation).store(1, std::memory_order_relaxed);
  }
  step(state_.reduced, &shm::LaneProgress::reduced, "reduced");
  return true;
}

bool Lane::pull_one() {
  if (!steps_.has_pull() || steps_.pull_blockers(false)) return false;
  Active& active = state_.at(state_.pulled.operation);
  if (active.pulls) {
    compare(state_.pulled.operation, active);
    state_.moved_bytes += prepare(active, state_.pulled);
    auto cut_off = [this] { return state_.is_cut_off(state_.pulled.operation); };
    if (!state_.runner.pull(active.item.operation, plan_, cut_off)) return false;
  }
  step(state_.pulled, &shm::LaneProgress::pulled, "pulled");
  return true;
}

bool Lane::retire() {
  if (state_.active.empty()) return false;
  Active& active = state_.active.front();
  bool agreed = compare(state_.retired, active);
  if (!agreed || !steps_.has_retire() || steps_.retire_blockers(false)) return false;
  if (state_.is_cut_off(state_.retired)) return false;  // a peer failed before this operation had ended there
  ++state_.counters.operations;
  if (const auto* nonfinite = active.item.operation.nonfinite.get(); nonfinite && nonfinite->anywhere) {
    for (int member = 0; member < state_.group.size; ++member)
      if (state_.noted(member, state_.retired).load(std::memory_order_relaxed) != 0) *nonfinite->anywhere = true;
  }
  sync_point("finished");
  if (active.opened != 0)
    trace_operation(trace::Kind::Reduced, active.opened, trace::now(), state_.group, active.item.work->place,
                    active.item.operation.output.bytes());
  auto work = std::move(active.item.work);
  trash_.push_back(std::move(active.item.operation.keepalive));
  state_.active.pop_front();
  if (++state_.retired % (shm::kRecords / 4) == 0)
    state_.own().compared.store(state_.retired, std::memory_order_release);  // release: the peers' records were read
  work->finish();
  return true;
}

// Includes memory of operations whose path is not chosen yet: peers know its published offsets all the same.
void Lane::add_direct_memory(std::vector<ArenaRange>& ranges) const {
  for (const Active& active : state_.active) {
    bool direct = active.in_arena && (!active.path_known || active.path == Path::Direct);
    if (!direct) continue;
    // Transfers to other hosts read this memory, and receivers may be told of the failure too late: so it is severed.
    const bool apart = active.item.operation.collective == Collective::AllReduce || exchange_;
    const size_t readers = exchange_ && state_.peers != 0 ? state_.group.offsets[state_.group.rank] : 0;
    for (const Span& span : active.item.operation.input.spans())
      ranges.push_back({static_cast<size_t>(span.data - state_.group.arena->at(0)), span.bytes, apart, readers});
  }
}

void Lane::fail_all(const std::exception_ptr& error) {
  if (exchange_) exchange_->drop_all();
  for (Active& active : state_.active) state_.queue.push_back(std::move(active.item));
  state_.active.clear();
  for (Item& item : std::exchange(state_.queue, {})) fail(std::move(item), error);
}

void Lane::fail(Item item, const std::exception_ptr& error) {
  trash_.push_back(std::move(item.operation.keepalive));
  item.work->fail(error);
}

}  // namespace syncengine
