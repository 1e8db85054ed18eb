#include "cuda/watchdog.h"

#include <algorithm>

#include "base/say.h"
#include "base/thread.h"

namespace syncengine::cuda {

namespace {

// The time between two looks, short enough to end a wait well within a second, and long enough to cost nothing.
constexpr auto kLook = std::chrono::milliseconds(5);
// Ranks that wait for each other for so long have a mismatch: other contexts of a device do not delay a stream so long.
constexpr auto kCrosswise = std::chrono::seconds(5);
// The time between two releases: a released stream makes its word 0, and goes on to its next wait, to be released, too.
constexpr auto kRelease = std::chrono::microseconds(200);

}  // namespace

void CallText::write(uint32_t key, const std::string& text) {
  if (fingerprint.load(std::memory_order_relaxed) == key) return;  // relaxed: its only writer
  fingerprint.store(0, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // who sees a new letter sees that the text is not complete
  for (size_t i = 0; i < std::size(letters); ++i)
    letters[i].store(i < text.size() ? text[i] : '\0', std::memory_order_relaxed);
  fingerprint.store(key, std::memory_order_release);  // release: the letters before their key
}

std::optional<std::string> CallText::read(uint32_t key) const {
  if (fingerprint.load(std::memory_order_acquire) != key) return std::nullopt;  // acquire: the letters
  std::string text;
  for (size_t i = 0; i < std::size(letters); ++i) text += letters[i].load(std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_acquire);  // the letters were read before their key is read again
  if (fingerprint.load(std::memory_order_relaxed) != key) return std::nullopt;
  return std::string(text.c_str());  // without the zeros behind it
}

Watchdog::Watchdog(std::shared_ptr<Communicator> communicator, std::vector<Control*> controls)
    : communicator_(std::move(communicator)),
      controls_(std::move(controls)),
      names_{communicator_->global_ranks()},
      since_(Clock::now()),
      thread_(start_thread([this] { run(); })) {}

void Watchdog::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stopped_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::publish(uint32_t fingerprint, const std::string& text) {
  own().latest.store(fingerprint, std::memory_order_relaxed);  // relaxed: only texts use it
  own().calls[fingerprint / 2 % std::size(own().calls)].write(fingerprint, text);
}

void Watchdog::throw_if_failed() const {
  while (load(own().mismatch[0]) != 0 && !has_failed()) std::this_thread::sleep_for(kLook);
  communicator_->throw_if_failed();
}

void Watchdog::run() {
  begin_thread("syncengine-cuda");
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    lock.unlock();
    if (!has_failed()) look();
    if (has_failed())  // repeated, since each queued collective resets the words
      for (auto& set : own().inbox)
        for (uint32_t& word : set) store(word, kReleased);
    lock.lock();
    stopped_.wait_for(lock, has_failed() ? Duration(kRelease) : Duration(kLook), [this] { return stopping_; });
  }
}

void Watchdog::look() {
  try {
    try {
      communicator_->check_peers();
      check_mismatch();
      check_wait();
    } catch (...) {
      communicator_->throw_if_failed();  // if not, memory was short, say, and the next look tries again
    }
  } catch (...) {             // the communicator has failed, and has the error
    store(own().aborted, 1);  // first, so that a stream finds no result after its release
    failed_.store(true, std::memory_order_release);
  }
}

void Watchdog::check_mismatch() {
  const uint32_t found = load(own().mismatch[0]);
  if (found == 0) return;
  const int rank = communicator_->rank(), peer = static_cast<int>(found) - 1;
  fail(ErrorKind::Mismatch, names_(rank) + " called " + text_of(rank, load(own().mismatch[2])) + ", " + names_(peer) +
                                " called " + text_of(peer, load(own().mismatch[1])));
}

void Watchdog::check_wait() {
  const std::pair now{load(own().waiting), load(own().progress)};
  if (now.first == 0 || now != stand_) {
    stand_ = now;
    since_ = Clock::now();
    logged_ = false;
    return;
  }
  const int rank = communicator_->rank();
  std::vector<int> late;
  for (int peer = 0; peer < communicator_->size(); ++peer)
    if (peer != rank && waits_for(rank, peer)) late.push_back(peer);
  if (late.empty()) return;
  const Duration age = Clock::now() - since_;
  const std::string call = latest_text(rank);
  for (int peer : late)
    if (controls_[peer]->gone.load(std::memory_order_acquire))  // acquire: what the peer did before it left
      fail(ErrorKind::PeerLost, names_(peer) + " has left while " + names_(rank) + " was in " + call);
  // Each rank signals before it waits, so two that wait for each other for so long are in different exchanges.
  for (int peer : late)
    if (age >= std::min<Duration>(kCrosswise, communicator_->timeout() / 4) && waits_for(peer, rank))
      fail(ErrorKind::Mismatch,
           names_(rank) + " waits in " + call + ", " + names_(peer) + " in " + latest_text(peer) + ", for each other");
  const std::string text =
      names_(rank) + " waits for " + names_.all(late) + " since " + seconds_text(age) + " in " + call;
  if (age >= communicator_->timeout())
    fail(ErrorKind::Timeout, text + ": a CUDA stream gave up after the timeout; look at what these ranks do");
  if (age >= communicator_->options().log_after && !std::exchange(logged_, true))
    say("syncengine: " + text + " (CUDA stream)\n");
}

void Watchdog::fail(ErrorKind kind, const std::string& text) const {
  communicator_->abort(kind, text);
  throw Error(kind, text);
}

bool Watchdog::waits_for(int rank, int peer) const {
  const Control& control = *controls_[rank];
  const uint32_t waiting = load(control.waiting);
  if (waiting == kInKernel) return load(control.late[peer]) != 0;
  return waiting > 0 && waiting <= kSets && load(control.inbox[waiting - 1][peer]) == 0;
}

std::string Watchdog::latest_text(int rank) const {
  return text_of(rank, controls_[rank]->latest.load(std::memory_order_relaxed));
}

std::string Watchdog::text_of(int rank, uint32_t fingerprint) const {
  const CallText& call = controls_[rank]->calls[fingerprint / 2 % std::size(controls_[rank]->calls)];
  return call.read(fingerprint).value_or("something else");
}

}  // namespace syncengine::cuda
