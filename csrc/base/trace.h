// Records what happens on this rank, as events in a ring of fixed size. The ring is a file, so that its events outlive
// this process however it ends, and any process of the machine can read them (syncengine/tracing/events.py).
//
// Ownership: one trace a process. A ring's file stays mapped until the next trace begins, and its addresses until the
// process ends, since a thread may be about to write into it. Thread-safety: any thread. Failure: start() throws
// InvalidUsage. An event is never refused: the oldest is overwritten, and readers know from the count of all events how
// many were. A forked child is not traced. Costs: without a trace one load for each event; with one, a reading of the
// clock or two, and 64 bytes.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace syncengine::trace {

// The kinds of events. docs/tracing.md explains each kind's fields; syncengine/tracing/events.py has the same names.
enum class Kind : uint16_t {
  Phase = 1,  // of a step: `lane` says which, `detail` how many of its nanoseconds are not its own (waited_here())
  Step,       // from the end of one synchronized backward of a model to the end of the next
  Bucket,     // from the first to the last gradient of a bucket
  Announced,  // an operation: its announcement, or call
  Scheduled,  // all ranks have announced it, and this rank knows
  Reduced,    // from its begin until it had ended here
  Delivered,  // averages were put into .grad
  Wait,       // a thread waited; `detail`: for which ranks of its host, as bits, when it began to
  Message,    // from its post until it had ended; `place`: the other rank
  Transfer,   // to or from another host; `place`: the other rank
  Copy,       // bytes that the last step copied or staged; `text` says why
  Error,      // a communicator has failed
  Note,       // anything else, in words
};

inline constexpr uint64_t kNobody = ~uint64_t{0};  // the rank that has sent the message is not known

// In events of an operation, `group`, `lane`, `place` and `epoch` identify it, alike on all ranks: see Work::Place.
struct Event {
  Kind kind;
  int64_t begin = 0, end = 0;  // now()
  uint64_t group = 0;          // of the communicator
  uint16_t lane = 0;
  uint64_t place = 0, epoch = 0;
  uint64_t detail = 0;
  uint32_t text = 0;  // see text()
};

inline int64_t at(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

inline int64_t now() { return at(std::chrono::steady_clock::now()); }

class Ring;
namespace internal {
extern std::atomic<Ring*> active;
}

// Whether events are recorded now. Callers ask this before they build an event.
inline bool is_on() { return internal::active.load(std::memory_order_acquire) != nullptr; }

// Begins a trace in a new file, for `events` events. `about`, its first text, describes this rank. After `steps` events
// of kind Step, if not 0, it stops by itself. Throws InvalidUsage if a trace exists, or if the file can't be made.
void start(const std::string& path, size_t events, const std::string& about, uint64_t steps);
// Ends this process's trace, and notes in its file that this rank has ended its part. Does nothing without a trace.
void stop();
// The path of this process's trace, also when the trace has stopped by itself; empty without one.
std::string path();

void record(const Event& event);
// Returns the number of `text` in the trace's file, and writes the text there the first time. Returns 0, which means no
// text, if there is no trace, or no room: readers know how often.
uint32_t text(const std::string& text);
// Records an event without duration, whose text is `words`. Does nothing without a trace.
void record_text(Kind kind, const std::string& words);

}  // namespace syncengine::trace
