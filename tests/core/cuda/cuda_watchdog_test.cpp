// The watchdog of GPU ranks: what ends a stream's wait, and with which error. Ranks are threads, words lie in shared
// pages.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "cuda/shared_pages.h"
#include "cuda/watchdog.h"
#include "cuda_twin.h"
#include "job.h"

namespace syncengine {

namespace {

using testing::contains, testing::run_job;

// What DeviceGroup has, without a device.
struct TwinRank {
  explicit TwinRank(Communicator& communicator)
      : rank(communicator.rank()),
        pages(cuda::share_pages(communicator, communicator.size() * sizeof(cuda::Control), {})) {
    for (int peer = 0; peer < communicator.size(); ++peer)
      controls.push_back(reinterpret_cast<cuda::Control*>(pages.data()) + peer);
    watchdog.emplace(communicator.shared_from_this(), controls);
  }
  // A barrier on the stream, which is this thread.
  void barrier(double prescale = 1.0, const std::string& text = "barrier()") {
    const Operation operation{.collective = Collective::Barrier, .prescale = prescale};
    const uint32_t mark = cuda::fingerprint(operation, Path::Staged, 0);
    watchdog->throw_if_failed();
    watchdog->publish(mark, text);
    testing::TwinSteps steps(rank, controls);
    cuda::Site site{
        .rank = rank, .world = static_cast<int>(controls.size()), .control = controls[rank], .slot_bytes = 64};
    site.slots.resize(site.world);
    cuda::run_sequence(operation, site, {}, mark, steps);
  }

  int rank;
  Mapping pages;
  std::vector<cuda::Control*> controls;
  std::optional<cuda::Watchdog> watchdog;
};

Options with_timeout(double timeout) { return {.timeout = seconds(timeout), .log_after = seconds(60)}; }

std::string error_of(TwinRank& rank, ErrorKind kind) {
  const auto deadline = Deadline::after(seconds(60));
  while (!rank.watchdog->has_failed() && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return CHECK_THROWS(rank.watchdog->throw_if_failed(), kind);
}

}  // namespace

// A text across two pages, of which a peer can't read the second until the owner has written another text: so the peer
// reads the beginning of one and the end of the other.
TEST(cuda_texts_of_calls_are_whole_or_not_there) {
  static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  static const std::string first(100, 'a'), second(100, 'b');
  const UniqueFd memory = create_sealed_memfd("test", 2 * page);
  const Mapping owners(memory.get(), 2 * page), peers(memory.get(), 2 * page);
  static cuda::CallText* owned;
  static std::byte* unread;
  owned = reinterpret_cast<cuda::CallText*>(owners.data() + page - sizeof(cuda::CallText) / 2);
  const auto* call = reinterpret_cast<cuda::CallText*>(peers.data() + page - sizeof(cuda::CallText) / 2);
  owned->write(1, first);
  CHECK(call->read(1) == first && !call->read(2));
  owned->write(2, std::string(500, 'c'));
  CHECK(!call->read(1) && call->read(2) == std::string(123, 'c'));
  owned->write(1, first);
  if constexpr (testing::kSlowdown > 1) return;  // sanitizers have handlers of their own
  struct sigaction handler{}, before{};
  handler.sa_handler = [](int) {
    owned->write(3, second);
    mprotect(unread, page, PROT_READ);
  };
  unread = peers.data() + page;
  CHECK_EQ(mprotect(unread, page, PROT_NONE), 0);
  sigaction(SIGSEGV, &handler, &before);
  const auto text = call->read(1);
  sigaction(SIGSEGV, &before, nullptr);
  CHECK(!text);
  CHECK(call->read(3) == second);
}

TEST(cuda_words_work_through_shared_pages) {
  run_job(3, with_timeout(20), [](int, Communicator& communicator) {
    TwinRank rank(communicator);
    for (int round = 0; round < 100; ++round) rank.barrier();
    rank.watchdog->throw_if_failed();
  });
}

TEST(cuda_watchdog_names_who_is_late) {
  std::atomic<bool> told = false;
  run_job(2, with_timeout(3), [&](int me, Communicator& communicator) {
    TwinRank rank(communicator);
    if (me == 1) {
      for (const auto deadline = Deadline::after(seconds(60)); !told && !deadline.passed();)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    const std::shared_ptr<void> end(nullptr, [&](void*) { told = true; });
    rank.barrier(1.0, "all_reduce(float32, 8 bytes)");  // is released
    const std::string text = error_of(rank, ErrorKind::Timeout);
    CHECK(contains(text, "rank 0 waits for rank 1 since") && contains(text, "all_reduce(float32, 8 bytes)"));
  });
}

TEST(cuda_watchdog_names_both_sides_of_a_mismatch) {
  run_job(2, with_timeout(20), [](int me, Communicator& communicator) {
    TwinRank rank(communicator);
    rank.barrier(1.0 + me, me ? "broadcast(int8)" : "all_reduce(float32)");
    const std::string text = error_of(rank, ErrorKind::Mismatch);
    CHECK(contains(text, "rank 0 called all_reduce(float32)") && contains(text, "rank 1 called broadcast(int8)"));
  });
}

TEST(cuda_watchdog_releases_after_a_peers_abort) {
  run_job(2, with_timeout(60), [](int me, Communicator& communicator) {
    TwinRank rank(communicator);
    if (me == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      communicator.abort(ErrorKind::Aborted, "rank 1: out of luck");
      return;
    }
    const auto begin = Clock::now();
    rank.barrier();
    CHECK(Clock::now() - begin < seconds(10));  // the timeout is 60 s
    CHECK(contains(error_of(rank, ErrorKind::Aborted), "out of luck"));
    CHECK_THROWS(rank.barrier(), ErrorKind::Aborted);  // and every later call
  });
}

// A peer has no name, which std::out_of_range says: an error of the thread, as std::bad_alloc is.
TEST(cuda_watchdog_releases_nobody_by_an_error_of_its_own) {
  run_job(2, with_timeout(20), [](int me, Communicator& communicator) {
    cuda::Control nobodys{};
    TwinRank rank(communicator);
    std::vector<cuda::Control*> controls = rank.controls;
    controls.push_back(&nobodys);
    rank.watchdog.emplace(communicator.shared_from_this(), controls);
    cuda::store(rank.controls[me]->mismatch[0], 1 + static_cast<uint32_t>(communicator.size()));
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // the thread looks every 5 ms
    cuda::store(rank.controls[me]->mismatch[0], 0);
    CHECK(!rank.watchdog->has_failed());
    rank.barrier();
    rank.watchdog->throw_if_failed();
  });
}

TEST(cuda_watchdog_names_a_peer_that_left) {
  std::atomic<bool> told = false;
  run_job(2, with_timeout(60), [&](int me, Communicator& communicator) {
    TwinRank rank(communicator);
    if (me == 1) {
      rank.controls[1]->gone.store(1);
      while (!told) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    rank.barrier();
    CHECK(contains(error_of(rank, ErrorKind::PeerLost), "rank 1 has left while rank 0 was in barrier()"));
    told = true;
  });
}

}  // namespace syncengine
