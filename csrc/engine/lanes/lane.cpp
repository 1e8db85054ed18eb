#include "engine/lanes/lane.h"

#include <algorithm>

#include "base/error.h"
#include "base/sync_point.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

namespace {

static_assert(shm::kFlagWords == kMaxFlagWords);

constexpr size_t kOneShotBytes = 1 << 10;  // up to here one exchange beats reading less
constexpr size_t kDirectBytes = 1 << 20;   // of a rank's slice: how often a direct operation looks around

Path wanted_path(Algorithm algorithm, const Operation& operation, bool in_arena) {
  bool small = operation.collective == Collective::AllReduce && operation.input.bytes() <= kOneShotBytes;
  switch (algorithm) {
    case Algorithm::OneShot: return Path::OneShot;
    case Algorithm::Staged: return Path::Staged;
    case Algorithm::Direct: return in_arena ? Path::Direct : Path::Staged;
    case Algorithm::Ring:
    case Algorithm::Auto: return small ? Path::OneShot : in_arena ? Path::Direct : Path::Staged;
  }
  return Path::Staged;
}

}  // namespace

Lane::Lane(const Group& group, int id, Algorithm algorithm, std::function<bool()> stop, Trash& trash)
    : group_(group),
      id_(id),
      algorithm_(algorithm),
      stop_(std::move(stop)),
      trash_(trash),
      runner_(group.rank, group.size) {}

void Lane::call(Item item) {
  auto& called = own().called;
  called.store(called.load(std::memory_order_relaxed) + 1, std::memory_order_release);  // relaxed: its only writer
  enqueue(std::move(item));
}

bool Lane::advance(size_t budget) {
  moved_bytes_ = 0;
  bool moved = false, again = true;
  while (again && moved_bytes_ <= budget) {
    // Oldest first: a pulled chunk frees its slot.
    again = pull_one();
    again |= reduce_one();
    again |= stage_one();
    again |= retire();
    again |= open();
    moved |= again;
  }
  return moved;
}

// A record is overwritten only after every rank has compared it with its own.
uint64_t Lane::record_users(bool all) const {
  return opened_ < shm::kRecords ? 0 : behind(&shm::LaneProgress::compared, opened_ - shm::kRecords + 1, all);
}

// Tells the peers where in the own arena the operation's spans lie; false if not all of them do. The direct path needs plain
// unscaled contributions.
bool Lane::publish_spans(const Operation& operation, uint64_t number) {
  const auto& spans = operation.input.spans();
  if (spans.empty() || spans.size() > shm::kMaxSpans || operation.prescale != 1.0) return false;
  if (spans.size() > 1 && operation.collective != Collective::AllReduce) return false;
  int64_t* offsets = group_.own().lanes[id_].span_offsets[number % shm::kRecords];
  for (const Span& span : spans) {
    *offsets = group_.arena->offset_of(span.data, span.bytes);
    if (*offsets++ < 0) return false;
  }
  return true;
}

// Where `member` has the operation's spans, as it says: bounds are checked, the lengths are the own ones.
SpanList Lane::spans_of(int member, uint64_t operation, const Operation& asked) const {
  if (member == group_.rank) return asked.input;
  const int64_t* offsets = group_.block(member).lanes[id_].span_offsets[operation % shm::kRecords];
  SpanList spans;
  for (const Span& own : asked.input.spans()) spans.add(group_.memory(member, *offsets++, own.bytes), own.bytes);
  return spans;
}

bool Lane::open() {
  if (queue_.empty() || active_.size() == shm::kRecords || record_users(false)) return false;
  Active active{.item = std::move(queue_.front()), .in_arena = false, .spans = {}};
  queue_.pop_front();
  const Operation& operation = active.item.operation;
  active.in_arena = publish_spans(operation, opened_);
  std::copy_n(operation.flags, operation.flag_words, group_.own().lanes[id_].flags[opened_ % shm::kRecords]);
  group_.own().lanes[id_].records[opened_ % shm::kRecords] = {
      .key = active.item.key,
      .bytes = block_bytes(operation),
      .layout_hash = operation.layout_hash,
      .spans = active.in_arena ? static_cast<int64_t>(operation.input.spans().size()) : -1,
      .prescale = operation.prescale,
      .postscale = operation.postscale,
      .root = operation.root,
      .collective = static_cast<uint8_t>(operation.collective),
      .dtype = static_cast<uint8_t>(operation.dtype),
      .op = static_cast<uint8_t>(operation.op),
      .numerics = static_cast<uint8_t>(operation.numerics),
      .flag_words = operation.flag_words};
  active.item.work->start();
  active_.push_back(std::move(active));
  own().opened.store(++opened_, std::memory_order_release);  // release: the record is complete
  sync_point("opened");
  return true;
}

bool Lane::choose_path(uint64_t operation, Active& active) {
  if (active.path_known) return true;
  const Operation& asked = active.item.operation;
  active.chunk_bytes = cut(operation, active);
  if (active.chunk_bytes == 0) return false;
  size_t block = block_bytes(asked);
  active.chunks = std::max<uint64_t>(1, (block + active.chunk_bytes - 1) / active.chunk_bytes);
  active.end = staged_.total + active.chunks;
  active.path_known = true;
  prepare(active, {operation, 0, staged_.total});
  active.reduces = plan_.reduces;
  active.pulls = plan_.pulls;
  active.peers_read_user = plan_.peers_read_user;
  auto& bytes = active.path == Path::Direct    ? counters_.direct_bytes
                : active.path == Path::OneShot ? counters_.one_shot_bytes
                                               : counters_.staged_bytes;
  bytes += asked.input.bytes();
  return true;
}

// Every rank comes to the same path: it follows from what all ranks published.
size_t Lane::cut(uint64_t operation, Active& active) {
  const Operation& asked = active.item.operation;
  active.path = wanted_path(algorithm_, asked, active.in_arena);
  if (active.path == Path::Direct && !find_peers_spans(operation, active)) return 0;
  return chunk_bytes(asked.collective, active.path, group_.size, slot_bytes_, kDirectBytes);
}

// Where all ranks have their spans; the path is staged if one has not all of them in its arena. False: not yet known.
bool Lane::find_peers_spans(uint64_t operation, Active& active) {
  const Operation& asked = active.item.operation;
  if (is_behind(&shm::LaneProgress::opened, operation + 1)) return false;
  verify(operation, active);
  for (int member = 0; member < group_.size && active.path == Path::Direct; ++member) {
    int64_t spans = group_.block(member).lanes[id_].records[operation % shm::kRecords].spans;
    if (spans < 0)
      active.path = Path::Staged;
    else if (static_cast<size_t>(spans) != asked.input.spans().size())
      throw Error(ErrorKind::Mismatch, group_.name(member) + " has " + describe(asked) + " in other pieces");
    else
      active.spans.push_back(spans_of(member, operation, asked));
  }
  return true;
}

// Fills plan_ and the runner's bases for the chunk at `cursor`. Returns the chunk's bytes.
size_t Lane::prepare(const Active& active, const Cursor& cursor) {
  const Operation& operation = active.item.operation;
  size_t block = block_bytes(operation);
  size_t begin = cursor.chunk * active.chunk_bytes;
  Chunk chunk{.collective = operation.collective,
              .path = active.path,
              .rank = group_.rank,
              .world = group_.size,
              .root = operation.root,
              .element = element_size(operation.dtype),
              .block = block,
              .begin = begin,
              .length = std::min(block - begin, active.chunk_bytes),
              .stage_all = operation.prescale != 1.0};
  plan(chunk);
  point_bases(active, cursor.total);
  return chunk.length;
}

void Lane::point_bases(const Active& active, uint64_t chunk) {
  for (int member = 0; member < group_.size; ++member) {
    runner_.bases()[member] =
        active.path == Path::Direct
            ? Runner::Base{.spans = &active.spans[member]}
            : Runner::Base{.slot = group_.block(member).staging[id_][0] + chunk % slots_ * slot_bytes_};
  }
}

void Lane::step(Cursor& cursor, Field field, const char* point) {
  const Active& active = at(cursor.operation);
  ++cursor.total;
  if (++cursor.chunk == active.chunks) {
    cursor.chunk = 0;
    ++cursor.operation;
  }
  (own().*field).store(cursor.total, std::memory_order_release);  // release: the bytes before the count
  sync_point(point);
  if (active.chunk_bytes > kOneShotBytes) group_.bell->ring_interested();  // else once at the end of the pass
}

bool Lane::stage_one() {
  if (staged_.operation == opened_) return false;
  Active& active = at(staged_.operation);
  if (!choose_path(staged_.operation, active)) return false;
  if (active.path != Path::Direct || always_slots_) {
    // The slot's last chunk must have been read by everybody, this rank included.
    if (staged_.total >= slots_) {
      uint64_t needed = staged_.total - slots_ + 1;
      if (pulled_.total < needed || is_behind(&shm::LaneProgress::pulled, needed)) return false;
    }
    moved_bytes_ += prepare(active, staged_);
    runner_.stage(active.item.operation, plan_);
  }
  step(staged_, &shm::LaneProgress::staged, "staged");
  return true;
}

bool Lane::reduce_one() {
  if (reduced_.total == staged_.total) return false;
  Active& active = at(reduced_.operation);
  if (active.reduces) {
    if (is_behind(&shm::LaneProgress::staged, reduced_.total + 1)) return false;
    verify(reduced_.operation, active);
    moved_bytes_ += prepare(active, reduced_);
    sync_point("reducing");
    if (!runner_.reduce(active.item.operation, plan_, stop_)) return false;
  }
  step(reduced_, &shm::LaneProgress::reduced, "reduced");
  return true;
}

// Broadcast waits for its root alone, everything else for everybody.
uint64_t Lane::pull_blockers(bool all) const {
  const Active& active = at(pulled_.operation);
  const Operation& operation = active.item.operation;
  if (!active.pulls) return 0;
  if (operation.collective != Collective::Broadcast) return behind(&shm::LaneProgress::reduced, pulled_.total + 1, all);
  bool late =
      peer(operation.root).reduced.load(std::memory_order_acquire) <= pulled_.total;  // acquire: the staged bytes
  return late ? uint64_t{1} << operation.root : 0;
}

bool Lane::pull_one() {
  if (pulled_.total == reduced_.total) return false;
  Active& active = at(pulled_.operation);
  if (pull_blockers(false)) return false;
  if (active.pulls) {
    verify(pulled_.operation, active);
    moved_bytes_ += prepare(active, pulled_);
    if (!runner_.pull(active.item.operation, plan_, stop_)) return false;
  }
  step(pulled_, &shm::LaneProgress::pulled, "pulled");
  return true;
}

bool Lane::retire() {
  if (active_.empty()) return false;
  Active& active = active_.front();
  bool agreed = verify(retired_, active);
  if (!agreed || pulled_.operation == retired_) return false;
  if (active.peers_read_user && is_behind(&shm::LaneProgress::pulled, active.end)) return false;
  if (stop_()) return false;  // a rank that slept through the peers' failure must not report success
  ++counters_.operations;
  sync_point("finished");
  auto work = std::move(active.item.work);
  trash_.push_back(std::move(active.item.operation.keepalive));
  active_.pop_front();
  if (++retired_ % (shm::kRecords / 4) == 0)
    own().compared.store(retired_, std::memory_order_release);  // release: the peers' records were read
  work->finish();
  return true;
}

// Compares the peers' records with the own one as they come in, and takes over their flags. True once all agreed.
bool Lane::verify(uint64_t operation, Active& active) {
  uint64_t everybody =
      (group_.size == 64 ? ~uint64_t{0} : (uint64_t{1} << group_.size) - 1) & ~(uint64_t{1} << group_.rank);
  if (active.verified == everybody) return true;
  const shm::OpRecord& mine = group_.own().lanes[id_].records[operation % shm::kRecords];
  for (int member = 0; member < group_.size; ++member) {
    uint64_t bit = uint64_t{1} << member;
    if (member == group_.rank || active.verified & bit) continue;
    if (peer(member).opened.load(std::memory_order_acquire) <= operation) continue;  // acquire: the record
    require_same(group_.global_ranks[group_.rank], mine, group_.global_ranks[member],
                 group_.block(member).lanes[id_].records[operation % shm::kRecords], active.item.operation);
    active.verified |= bit;
    const uint64_t* flags = group_.block(member).lanes[id_].flags[operation % shm::kRecords];
    for (size_t i = 0; i < mine.flag_words; ++i) active.item.operation.flags[i] |= flags[i];
  }
  return active.verified == everybody;
}

uint64_t Lane::behind(Field field, uint64_t count, bool all) const {
  uint64_t members = 0;
  for (int member = 0; member < group_.size; ++member) {
    if (member == group_.rank) continue;
    if ((peer(member).*field).load(std::memory_order_acquire) >= count)
      continue;  // acquire: the bytes behind the count
    members |= uint64_t{1} << member;
    if (!all) break;
  }
  return members;
}

uint64_t Lane::missing(bool all) const {
  if (active_.empty()) return queue_.empty() ? 0 : record_users(all);
  uint64_t members = 0;
  if (staged_.operation < opened_) {
    if (!at(staged_.operation).path_known) {
      members |= behind(&shm::LaneProgress::opened, staged_.operation + 1, all);
    } else if (staged_.total >= slots_) {
      members |= behind(&shm::LaneProgress::pulled, staged_.total - slots_ + 1, all);
    }
  }
  if (reduced_.total < staged_.total && at(reduced_.operation).reduces)
    members |= behind(&shm::LaneProgress::staged, reduced_.total + 1, all);
  if (pulled_.total < reduced_.total) members |= pull_blockers(all);
  members |= behind(&shm::LaneProgress::opened, retired_ + 1, all);
  if (!queue_.empty()) members |= record_users(all);
  const Active& front = active_.front();
  if (pulled_.operation > retired_ && front.peers_read_user)
    members |= behind(&shm::LaneProgress::pulled, front.end, all);
  return members;
}

// The same conditions as in missing(), oldest step first.
uint64_t Lane::blocking_ranks() const {
  if (active_.empty()) return missing(true);
  const Active& front = active_.front();
  if (pulled_.operation > retired_) {
    uint64_t members = behind(&shm::LaneProgress::opened, retired_ + 1, true);
    return front.peers_read_user ? members | behind(&shm::LaneProgress::pulled, front.end, true) : members;
  }
  if (pulled_.total < reduced_.total) return pull_blockers(true);
  if (reduced_.total < staged_.total)
    return at(reduced_.operation).reduces ? behind(&shm::LaneProgress::staged, reduced_.total + 1, true) : 0;
  return missing(true);
}

// An offset that was published is known to the peers, even if this rank has not chosen its path yet.
void Lane::add_direct_memory(std::vector<ArenaRange>& ranges) const {
  for (const Active& active : active_) {
    bool direct = active.in_arena && (!active.path_known || active.path == Path::Direct);
    if (!direct) continue;
    for (const Span& span : active.item.operation.input.spans())
      ranges.push_back({static_cast<size_t>(span.data - group_.arena->at(0)), span.bytes});
  }
}

void Lane::fail_all(const std::exception_ptr& error) {
  for (Active& active : active_) queue_.push_back(std::move(active.item));
  active_.clear();
  for (Item& item : queue_) {
    trash_.push_back(std::move(item.operation.keepalive));
    item.work->fail(error);
  }
  queue_.clear();
}

}  // namespace syncengine
