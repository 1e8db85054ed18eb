// What ends the waits of streams whose bytes a transport moves, with the test's own thread in a stream's place.
#include "cuda/transport_watch.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "cuda/control.h"
#include "job.h"

namespace syncengine {

namespace {

using testing::contains;
using testing::run_job;

constexpr uint32_t kMark = cuda::kArrived | 7;  // a fingerprint

// As TransportGroup's streams write the words; `release` only counts.
struct Stream {
  explicit Stream(Communicator& communicator)
      : watch(communicator.shared_from_this(), &words, [this] {
          aborted_at_release = cuda::load(words.aborted);
          ++released;
        }) {}

  void begin(const std::string& text) {
    watch.publish(kMark, text);
    cuda::store(words.waiting, kMark);
    cuda::store(words.go, 0);
  }
  void wait() {
    while (cuda::load(words.go) != cuda::kArrived) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

  cuda::TransportWords words{};
  std::atomic<int> released{0};
  std::atomic<uint32_t> aborted_at_release{0};
  cuda::TransportWatch watch;  // last: its thread looks at the rest
};

Options within(double limit) {
  Options options;
  options.timeout = seconds(limit);
  options.log_after = seconds(60);
  return options;
}

void wait_for(const std::atomic<bool>& told) {
  const auto deadline = Deadline::after(seconds(20));  // of a test that has failed
  while (!told && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace

TEST(transport_watch_ends_a_wait_at_the_deadline) {
  std::atomic<bool> told = false;
  run_job(2, within(0.3), [&](int me, Communicator& communicator) {
    if (me == 1) return wait_for(told);
    Stream stream(communicator);
    stream.begin("all_reduce(float32, 8 bytes)");
    stream.wait();
    const std::string text = CHECK_THROWS(communicator.throw_if_failed(), ErrorKind::Timeout);
    CHECK(contains(text, "rank 0 waits for other ranks since") && contains(text, "all_reduce(float32, 8 bytes)"));
    CHECK_EQ(stream.released.load(), 1);
    CHECK_EQ(stream.aborted_at_release.load(), 1u);  // what comes after is no result
    for (int queued = 0; queued < 3; ++queued) {     // what was queued before anyone knew does not wait either
      stream.begin("barrier()");
      stream.wait();
    }
    CHECK_EQ(stream.released.load(), 1);
    told = true;
  });
}

TEST(transport_watch_leaves_an_idle_stream_alone) {
  run_job(2, within(0.1), [](int, Communicator& communicator) {
    Stream stream(communicator);
    stream.begin("barrier()");
    cuda::store(stream.words.waiting, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    communicator.throw_if_failed();
    CHECK_EQ(stream.released.load(), 0);
    CHECK_EQ(cuda::load(stream.words.go), 0u);
  });
}

TEST(transport_watch_names_who_called_something_else) {
  std::atomic<bool> told = false;
  run_job(2, within(60), [&](int me, Communicator& communicator) {
    if (me == 1) return wait_for(told);
    Stream stream(communicator);
    stream.begin("broadcast(int8)");
    cuda::store(stream.words.mismatch[2], kMark);
    cuda::store(stream.words.mismatch[0], 1 + 1);
    stream.wait();
    const std::string text = CHECK_THROWS(communicator.throw_if_failed(), ErrorKind::Mismatch);
    CHECK(contains(text, "rank 0 called broadcast(int8), rank 1 something else"));
    told = true;
  });
}

TEST(transport_watch_ends_a_wait_when_a_peer_aborts) {
  run_job(2, within(60), [](int me, Communicator& communicator) {
    if (me == 1) return communicator.abort(ErrorKind::Aborted, "rank 1: out of luck");
    Stream stream(communicator);
    stream.begin("barrier()");
    stream.wait();
    CHECK(contains(CHECK_THROWS(communicator.throw_if_failed(), ErrorKind::Aborted), "out of luck"));
    CHECK_EQ(stream.aborted_at_release.load(), 1u);
  });
}

}  // namespace syncengine
