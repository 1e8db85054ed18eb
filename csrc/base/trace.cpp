#include "base/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/memory.h"

namespace syncengine::trace {

std::atomic<Ring*> internal::active{nullptr};

class Ring {
 public:
  Ring(const std::string& file, size_t events, uint64_t steps) : path(file), steps_left(steps), capacity_(events) {
    ::unlink(file.c_str());  // an earlier trace may still be mapped
    const UniqueFd fd(::open(file.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    // All room is allocated now: if the disk filled up later, a store into the mapping would kill the process.
    int error = fd.get() < 0 ? errno : ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes_));
    void* memory = error ? MAP_FAILED : ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
    if (!error && memory == MAP_FAILED) error = errno;
    if (error) {
      if (fd) ::unlink(file.c_str());
      throw Error(ErrorKind::InvalidUsage, "the trace can't be written to " + file + ": " + std::strerror(error) +
                                               "; give another directory, with " + std::to_string(bytes_ >> 20) +
                                               " MiB of room for each rank");
    }
    advise(memory, bytes_, MADV_POPULATE_WRITE);  // else each 64th event waits for a page; kernels before 5.14 refuse
    header_ = new (memory) Header{.magic = 0, .capacity = events, .text_bytes = kTextBytes};
    texts_ = static_cast<char*>(memory) + kHeaderBytes;
    slots_ = reinterpret_cast<Slot*>(texts_ + kTextBytes);
    header_->magic = kMagic;
  }

  void record(const Event& event) {
    const uint64_t number = header_->recorded.fetch_add(1, std::memory_order_relaxed);  // relaxed: a ticket
    Slot& slot = slots_[number % capacity_];
    slot.number.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);  // who sees a new word sees that the event is not complete
    const std::array<uint64_t, 7> words{
        static_cast<uint64_t>(event.begin),
        static_cast<uint64_t>(event.end),
        event.group,
        event.place,
        event.epoch,
        event.detail,
        event.text | uint64_t{static_cast<uint16_t>(event.kind)} << 32 | uint64_t{event.lane} << 48};
    for (size_t i = 0; i < words.size(); ++i) slot.words[i].store(words[i], std::memory_order_relaxed);
    slot.number.store(number + 1, std::memory_order_release);
  }

  uint32_t text(const std::string& text) {
    std::lock_guard lock(mutex_);
    const auto [known, is_new] = known_.try_emplace(text, 0);
    if (!is_new) return known->second;
    const uint64_t used = header_->text_used.load(std::memory_order_relaxed);  // relaxed: under the lock
    const uint32_t length = static_cast<uint32_t>(text.size());
    if (used + sizeof(length) + length > kTextBytes) {
      known_.erase(known);
      header_->textless.fetch_add(1, std::memory_order_relaxed);  // relaxed: a count
      return 0;
    }
    std::memcpy(texts_ + used, &length, sizeof(length));
    std::memcpy(texts_ + used + sizeof(length), text.data(), length);
    header_->text_used.store(used + sizeof(length) + length, std::memory_order_release);
    return known->second = static_cast<uint32_t>(known_.size());
  }

  void end() { header_->ended.store(1, std::memory_order_release); }

  // Puts private memory that nobody reads in place of the file's mapping, once. The addresses stay valid for a thread
  // that was about to write an event of this trace. If Linux refuses, nothing changes, and the next trace tries again.
  void release() {
    if (bytes_ == 0) return;
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (::mmap(header_, bytes_, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED) return;
    bytes_ = 0;
    if (std::unique_lock lock(mutex_, std::try_to_lock); lock) known_.clear();  // a fork may have left it locked
  }

  const std::string path;
  std::atomic<uint64_t> steps_left;  // 0: no limit

 private:
  static constexpr uint64_t kMagic = 0x3165636172545353;  // "SSTrace1", little-endian
  static constexpr size_t kHeaderBytes = 4096;
  static constexpr size_t kTextBytes = 1 << 20;

  // The file's header. syncengine/tracing/events.py reads it, and the slots, by the same layout.
  struct Header {
    uint64_t magic, capacity, text_bytes;
    std::atomic<uint64_t> recorded;   // events so far
    std::atomic<uint64_t> text_used;  // bytes of texts
    std::atomic<uint64_t> ended;      // 1: this rank has stopped
    std::atomic<uint64_t> textless;   // events without their text, for which there was no room
  };

  // An event in the ring, of relaxed atomics: a thread that is stopped while it writes an event may meet another thread
  // in the same slot, a whole turn of the ring later. `number` then tells readers that the event is torn.
  struct Slot {
    std::atomic<uint64_t> number;  // 1 + how many were recorded before, once the rest is there
    std::array<std::atomic<uint64_t>, 7> words;
  };
  static_assert(sizeof(Slot) == 64 && std::atomic<uint64_t>::is_always_lock_free);

  const size_t capacity_;
  size_t bytes_ = kHeaderBytes + kTextBytes + capacity_ * sizeof(Slot);  // 0 after release()
  Header* header_;
  char* texts_;
  Slot* slots_;
  std::mutex mutex_;
  std::unordered_map<std::string, uint32_t> known_;  // texts and their numbers, from 1 in the order of writing
};

namespace {

struct OfProcess {
  std::mutex mutex;
  std::vector<std::unique_ptr<Ring>> rings;  // a thread may be about to write into an earlier one
  Ring* current = nullptr;                   // until stop()
};
OfProcess& of_process = *new OfProcess;  // never destroyed: threads may outlive static objects

}  // namespace

void start(const std::string& path, size_t events, const std::string& about, uint64_t steps) {
  [[maybe_unused]] static int once = pthread_atfork(nullptr, nullptr, [] {
    internal::active.store(nullptr, std::memory_order_release);
    of_process.current = nullptr;
  });
  auto& [mutex, rings, current] = of_process;
  std::lock_guard lock(mutex);
  if (current) throw Error(ErrorKind::InvalidUsage, "this process is traced already, into " + current->path);
  for (const auto& ring : rings) ring->release();
  rings.push_back(std::make_unique<Ring>(path, std::max<size_t>(events, 1), steps));
  current = rings.back().get();
  current->text(about);
  internal::active.store(current, std::memory_order_release);
}

void stop() {
  auto& [mutex, rings, current] = of_process;
  std::lock_guard lock(mutex);
  internal::active.store(nullptr, std::memory_order_release);
  if (current) std::exchange(current, nullptr)->end();
}

std::string path() {
  auto& [mutex, rings, current] = of_process;
  std::lock_guard lock(mutex);
  return current ? current->path : "";
}

void record(const Event& event) {
  Ring* ring = internal::active.load(std::memory_order_acquire);  // acquire: what it consists of
  if (!ring) return;
  ring->record(event);
  if (event.kind != Kind::Step || ring->steps_left.load(std::memory_order_relaxed) == 0) return;
  if (ring->steps_left.fetch_sub(1, std::memory_order_relaxed) == 1)
    internal::active.compare_exchange_strong(ring, nullptr, std::memory_order_release);
}

uint32_t text(const std::string& text) {
  Ring* ring = internal::active.load(std::memory_order_acquire);
  return ring ? ring->text(text) : 0;
}

void record_text(Kind kind, const std::string& words) {
  const int64_t at = now();
  record({.kind = kind, .begin = at, .end = at, .text = text(words)});
}

}  // namespace syncengine::trace
