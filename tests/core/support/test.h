// A tiny test framework for the core, which builds without torch or any other library.
//
//   TEST(adds_in_rank_order) { CHECK_EQ(1 + 1, 2); CHECK_THROWS(fail(), ErrorKind::Timeout); }
//
// A failed check throws out of the calling thread's test body. On another thread use run_ranks (or catch and rethrow).
#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"

namespace syncengine::testing {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Test {
  const char* name;
  const char* file;
  void (*body)();
};

std::vector<Test>& registry();

struct Registration {
  Registration(const char* name, const char* file, void (*body)()) { registry().push_back({name, file, body}); }
};

// Divides repetitions: sanitizers take about ten times as long.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr int kSlowdown = 6;
#else
inline constexpr int kSlowdown = 1;
#endif

// A test that takes longer is taken for hung: the program aborts and names it.
inline constexpr std::chrono::seconds kTestDeadline{300};

[[noreturn]] inline void fail(const char* file, int line, const std::string& text) {
  throw Failure(std::string(file) + ":" + std::to_string(line) + ": " + text);
}

template <class T>
std::string show(const T& value) {
  if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream out;
    out.precision(17);
    out << value;
    return out.str();
  } else {
    return "(unprintable)";
  }
}

template <class A, class B>
void check_equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (!(a == b)) fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Returns the error's text.
template <class Call>
std::string check_throws(Call&& call, ErrorKind kind, const char* text, const char* file, int line) {
  try {
    call();
  } catch (const Error& error) {
    if (error.kind() == kind) return error.what();
    fail(file, line, std::string(text) + " threw " + name(error.kind()) + ", not " + name(kind) + ": " + error.what());
  }
  fail(file, line, std::string(text).append(" did not throw ").append(name(kind)));  // GCC 12 warns of +
}

// Whether a check of the call fails: the other side of a walk that finds nothing.
template <class Call>
bool fails(Call&& call) {
  try {
    call();
  } catch (const Failure&) {
    return true;
  }
  return false;
}

// Runs body(limit), in which a call waits until that many seconds have passed. On a busy machine other threads may need
// longer than that for their part; then the body gets more time.
template <class Body>
void with_limit(double limit, Body&& body) {
  if (fails([&] { body(limit); })) body(10 * limit);
}

// Runs body(rank) for each rank on a thread of its own, joins them all, then rethrows the lowest rank's exception.
inline void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

}  // namespace syncengine::testing

#define TEST(id)                                                                                \
  static void test_##id();                                                                      \
  static const ::syncengine::testing::Registration registration_##id(#id, __FILE__, test_##id); \
  static void test_##id()

#define CHECK(condition) \
  ((condition) ? void() : ::syncengine::testing::fail(__FILE__, __LINE__, "not true: " #condition))

#define CHECK_EQ(a, b) ::syncengine::testing::check_equal((a), (b), #a " == " #b, __FILE__, __LINE__)

// Gives the error's text.
#define CHECK_THROWS(expression, kind) \
  ::syncengine::testing::check_throws([&] { (void)(expression); }, (kind), #expression, __FILE__, __LINE__)
