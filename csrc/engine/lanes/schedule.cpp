#include "engine/lanes/schedule.h"

#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "base/sync_point.h"
#include "base/trace.h"
#include "engine/lanes/slots.h"

namespace syncengine {

void Schedule::announce(Lane::Item item) {
  const uint64_t slot = item.key, step = item.work->place.epoch;
  uint64_t ended = item.slots->base();
  if (auto known = ends_.find(item.slots->first()); known != ends_.end())
    ended = std::max(ended, known->second.announced);
  if (slot == item.slots->end_slot()) ends_[item.slots->first()].announced = step;
  if (trace::is_on()) trace_announced(group_, item);
  waiting_.push_back({std::move(item), step, ended});
  has_unjudged_ = true;
  group_.own().announced[slot].store(step, std::memory_order_release);
  sync_point("announced");
}

// Peers load the count of refusals first, then the refused step, then the text: so these are stored in reverse.
void Schedule::refuse(const Slots& slots, uint64_t step, const std::string& text) {
  shm::GroupBlock& own = group_.own();
  uint64_t words[Slots::kTextWords] = {};
  std::memcpy(words, text.data(), std::min(text.size(), sizeof(words)));
  for (size_t i = 0; i < Slots::kTextWords; ++i)
    own.announced[slots.text_words() + i].store(words[i], std::memory_order_relaxed);
  // release: the text, and what was announced of the step
  own.announced[slots.refused_word()].store(step, std::memory_order_release);
  own.refusal.store(slots.text_words(), std::memory_order_release);
  own.refusals.fetch_add(1, std::memory_order_release);
  sync_point("refused");
}

std::string Schedule::text_at(int member, uint64_t text_words) const {
  const auto first = Checked<uint64_t>::at_most(shm::kReadySlots - Slots::kTextWords, text_words);
  if (!first) return group_.name(member) + " refused a step" + kDamaged;
  uint64_t words[Slots::kTextWords] = {};
  for (size_t i = 0; i < Slots::kTextWords; ++i)
    words[i] = group_.block(member).announced[first->get() + i].load(std::memory_order_relaxed);
  const auto* text = reinterpret_cast<const char*>(words);
  return {text, strnlen(text, sizeof(words))};
}

std::string Schedule::refusal_of(int member) const {
  const uint64_t text_words = group_.block(member).refusal.load(std::memory_order_acquire);  // acquire: the text
  return text_words == 0 ? "" : text_at(member, text_words);
}

std::string Schedule::refusal_met() const {
  const std::string own = refusal_of(group_.rank);
  return own.empty() && !met_.empty() ? met_.begin()->second : own;
}

bool Schedule::advance() {
  bool moved = drop_refused();
  moved |= group_.rank == 0 && append_ready();
  return take_scheduled() || moved;
}

uint64_t Schedule::refusals() const {
  uint64_t count = 0;
  for (int member = 0; member < group_.size; ++member)
    count += group_.block(member).refusals.load(std::memory_order_acquire);  // acquire: what was refused
  return count;
}

// Fails operations that never run. Looks for these only after a new refusal, or, from the first refusal on, a new
// operation.
bool Schedule::drop_refused() {
  if (waiting_.empty()) return false;
  const uint64_t count = refusals();
  if (count == 0 || (count == judged_ && !has_unjudged_)) return false;
  judged_ = count;
  has_unjudged_ = false;
  return drop([this](const AnnouncedOperation& announced) {
    auto text = reason_to_drop(announced);
    if (text) met_[announced.item.slots->first()] = *text;
    return text;
  });
}

template <class TextOf>
bool Schedule::drop(const TextOf& text_of) {
  const size_t before = waiting_.size();
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    if (const std::optional<std::string> text = text_of(*it)) {
      Lane::Item item = std::move(it->item);
      it = waiting_.erase(it);
      lane_.fail(std::move(item), std::make_exception_ptr(StepRefused(*text)));
    } else {
      ++it;
    }
  }
  return waiting_.size() < before;
}

std::optional<std::string> Schedule::reason_to_drop(const AnnouncedOperation& announced) const {
  const Slots& slots = *announced.item.slots;
  for (int member = 0; member < group_.size; ++member) {
    if (member == group_.rank) continue;
    const auto& said = group_.block(member).announced;
    const uint64_t refused = said[slots.refused_word()].load(std::memory_order_acquire);  // acquire: what came before
    const uint64_t theirs = said[announced.item.key].load(std::memory_order_acquire);
    const auto text = [&] { return text_at(member, slots.text_words()); };
    if (is_refused(announced, refused, theirs, text)) return text();
  }
  return {};
}

bool Schedule::is_refused(const AnnouncedOperation& announced, uint64_t refused, uint64_t theirs,
                          const std::function<std::string()>& text) {
  if (passed_over(announced.step, announced.ended, refused)) throw Error(ErrorKind::Aborted, text());
  return !announced.is_end() && never_runs(announced.step, refused, theirs);
}

uint64_t Schedule::late(uint64_t slot, uint64_t step, bool all) const {
  uint64_t members = 0;
  for (int member = 0; member < group_.size; ++member) {
    if (group_.block(member).announced[slot].load(std::memory_order_acquire) >= step) continue;
    members |= uint64_t{1} << member;
    if (!all) break;
  }
  return members;
}

bool Schedule::has_room() const {
  uint64_t length = group_.own().schedule.length.load(std::memory_order_relaxed);  // relaxed: its only writer
  for (int member = 0; member < group_.size; ++member) {
    uint64_t opened = group_.block(member).lanes[shm::kScheduledLane].progress.opened.load(std::memory_order_acquire);
    if (length - opened >= shm::kLogEntries) return false;
  }
  return true;
}

bool Schedule::append_ready() {
  shm::ScheduleLog& log = group_.own().schedule;
  uint64_t length = log.length.load(std::memory_order_relaxed);  // relaxed: its only writer
  uint64_t before = length;
  // The first of the waiting operations are those that this rank has logged already, but not yet taken from the log.
  for (size_t i = length - taken_; i < waiting_.size(); ++i) {
    if (late(waiting_[i].item.key, waiting_[i].step, false)) continue;
    auto is_logged = [&](const AnnouncedOperation& other) { return &other < &waiting_[length - taken_]; };
    if (waiting_[i].is_end() && has_more(waiting_[i], is_logged)) continue;
    if (!has_room()) return length > before;
    log.slots[length % shm::kLogEntries] = waiting_[i].item.key;
    std::rotate(waiting_.begin() + static_cast<long>(length - taken_), waiting_.begin() + static_cast<long>(i),
                waiting_.begin() + static_cast<long>(i) + 1);
    log.length.store(++length, std::memory_order_release);  // release: the entry
    sync_point("scheduled");
  }
  return length > before;
}

bool Schedule::take_scheduled() {
  const shm::ScheduleLog& log = group_.block(0).schedule;
  uint64_t length = log.length.load(std::memory_order_acquire);  // acquire: the entries
  bool moved = taken_ < length;
  for (; taken_ < length; ++taken_) {
    uint64_t key = log.slots[taken_ % shm::kLogEntries];
    auto found = std::ranges::find(waiting_, key, [](const AnnouncedOperation& each) { return each.item.key; });
    if (found == waiting_.end())
      throw Error(ErrorKind::Mismatch, group_.name(0) + " scheduled a bucket that " + group_.name(group_.rank) +
                                           " has not announced: the ranks' models differ");
    if (trace::is_on()) {
      const int64_t now = trace::now();
      trace_operation(trace::Kind::Scheduled, now, now, group_, found->item.work->place);
    }
    AnnouncedOperation taken = std::move(*found);
    waiting_.erase(found);
    if (taken.is_end()) end_step(taken);
    lane_.enqueue(std::move(taken.item));
  }
  return moved;
}

// Notes that the step's end is scheduled, and fails the rest of the step here: nothing of it runs after its end.
void Schedule::end_step(const AnnouncedOperation& end) {
  const auto& slots = end.item.slots;
  ends_[slots->first()].taken = end.step;
  ending_.push_back({slots, end.item.work});
  drop([&](const AnnouncedOperation& left) -> std::optional<std::string> {
    if (left.item.slots != slots) return {};
    return "this step of the model has ended";
  });
}

// Zeroes the text words before the slots are reused: the next holder reads every word as a step number, and leftover
// text would look like a huge one.
void Schedule::withdraw_refusals() {
  std::erase_if(ending_, [this](const auto& ending) {
    const auto& [slots, end] = ending;
    if (!end->ended()) return false;
    met_.erase(slots->first());
    shm::GroupBlock& own = group_.own();
    if (own.refusal.load(std::memory_order_relaxed) == slots->text_words())  // relaxed: its only writer
      own.refusal.store(0, std::memory_order_relaxed);
    for (size_t i = 0; i < Slots::kTextWords; ++i)
      own.announced[slots->text_words() + i].store(0, std::memory_order_relaxed);
    return true;
  });
}

uint64_t Schedule::missing(bool all) const {
  uint64_t members = 0;
  for (const AnnouncedOperation& announced : waiting_) {
    const uint64_t others = late(announced.item.key, announced.step, all);
    // Only rank 0 acts on the others' announcements, so all others sleep until rank 0 does.
    members |= group_.rank == 0 || (all && others) ? others : 1;
  }
  return members;
}

uint64_t Schedule::blocking_ranks() const {
  if (waiting_.empty()) return 0;
  uint64_t members = late(waiting_.front().item.key, waiting_.front().step, true);
  return members || group_.rank == 0 ? members : 1;
}

void Schedule::fail_all() {
  for (AnnouncedOperation& announced : waiting_) lane_.enqueue(std::move(announced.item));
  waiting_.clear();
}

uint64_t SlotTable::gap(uint64_t from, size_t count) const {
  std::lock_guard lock(mutex_);
  auto next = held_.upper_bound(from);
  if (next != held_.begin()) --next;
  for (; next != held_.end() && next->first < from + count; ++next) from = std::max(from, next->second);
  return count <= size_ && from <= size_ - count ? from : size_;
}

std::shared_ptr<const Slots> SlotTable::take(uint64_t first, size_t count, uint64_t base) {
  if (first == size_ || gap(first, count) != first) return nullptr;
  {
    std::lock_guard lock(mutex_);
    held_.emplace(first, first + count);
    end_ = std::max<uint64_t>(end_, first + count);
  }
  return {new Slots(first, count, base), [table = shared_from_this()](const Slots* slots) {
            std::lock_guard lock(table->mutex_);
            table->held_.erase(slots->first());
            delete slots;
          }};
}

}  // namespace syncengine
