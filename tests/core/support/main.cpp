// Runs the registered tests: all, or those whose name or file contains one of the arguments. An argument `-NAME` leaves
// out those whose name or file contains NAME. TEST_PART=1/2 in the environment runs every second one of them,
// TEST_PART=2/2 the others. TEST_DEADLINE: seconds that a test may take.
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "test.h"

namespace syncengine::testing {

std::vector<Test>& registry() {
  static std::vector<Test> tests;
  return tests;
}

namespace {

// Aborts the program, with the test's name, if the test outlives its deadline.
class Watchdog {
 public:
  explicit Watchdog(const char* test) : thread_([this, test] { watch(test); }) {}
  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      done_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

 private:
  void watch(const char* test) {
    const char* given = std::getenv("TEST_DEADLINE");
    const std::chrono::seconds most = given ? std::chrono::seconds(std::atoi(given)) : kTestDeadline;
    std::unique_lock lock(mutex_);
    if (changed_.wait_for(lock, most, [this] { return done_; })) return;
    std::fprintf(stderr, "HUNG    %s: not done after %lld s\n", test, static_cast<long long>(most.count()));
    std::abort();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;  // last: starts when the rest is ready
};

bool is_selected(const Test& test, int argc, char** argv) {
  bool named = false, all = true;
  for (int i = 1; i < argc; ++i) {
    const bool left_out = argv[i][0] == '-';
    const char* part = argv[i] + left_out;
    const bool matches = std::strstr(test.name, part) || std::strstr(test.file, part);
    if (left_out && matches) return false;
    named |= matches;
    all &= left_out;
  }
  return named || all;
}

struct Part {
  int number = 1, of = 1;
};

Part part_from_environment() {
  const char* text = std::getenv("TEST_PART");
  Part part;
  if (!text) return part;
  if (std::sscanf(text, "%d/%d", &part.number, &part.of) == 2 && part.number >= 1 && part.number <= part.of)
    return part;
  std::fprintf(stderr, "TEST_PART=%s is not a part such as 1/2\n", text);
  std::exit(2);
}

std::string run(const Test& test) {
  Watchdog watchdog(test.name);
  try {
    test.body();
    return "";
  } catch (const Error& error) {
    return std::string("threw ") + name(error.kind()) + ": " + error.what();
  } catch (const std::exception& error) {
    return error.what();
  }
}

int run_all(int argc, char** argv) {
  int passed = 0;
  int failed = 0;
  int selected = 0;
  const Part part = part_from_environment();
  for (const Test& test : registry()) {
    if (!is_selected(test, argc, argv) || selected++ % part.of != part.number - 1) continue;
    std::string problem = run(test);
    if (problem.empty()) {
      ++passed;
    } else {
      ++failed;
      std::fprintf(stderr, "FAILED  %s\n        %s\n", test.name, problem.c_str());
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0;  // no test at all is a failure: a wrong filter must not look like success
}

}  // namespace
}  // namespace syncengine::testing

int main(int argc, char** argv) { return syncengine::testing::run_all(argc, argv); }
