#include "base/trace.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "child.h"
#include "test.h"

namespace syncengine::testing {
namespace {

// What syncengine/tracing/events.py reads, by its own knowledge of the layout.
struct Read {
  uint64_t recorded = 0, ended = 0, textless = 0;
  std::vector<std::string> texts;
  std::vector<std::vector<uint64_t>> events;  // complete ones: number, then seven words

  explicit Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes((std::istreambuf_iterator<char>(file)), {});
    uint64_t head[7];
    std::memcpy(head, bytes.data(), sizeof(head));
    CHECK_EQ(bytes.substr(0, 8), std::string("SSTrace1"));
    recorded = head[3];
    ended = head[5];
    textless = head[6];
    for (size_t at = 4096; at < 4096 + head[4];) {
      uint32_t length;
      std::memcpy(&length, &bytes[at], sizeof(length));
      texts.push_back(bytes.substr(at + 4, length));
      at += 4 + length;
    }
    for (size_t i = 0; i < head[1]; ++i) {
      std::vector<uint64_t> words(8);
      std::memcpy(words.data(), &bytes[4096 + head[2] + 64 * i], 64);
      if (words[0] != 0) events.push_back(words);
    }
  }
};

struct Traced {
  std::string path = "/tmp/syncengine_trace_test." + std::to_string(::getpid());
  explicit Traced(size_t events) { trace::start(path, events, "about", 0); }
  ~Traced() {
    trace::stop();
    ::unlink(path.c_str());
  }
};

TEST(trace_records_nothing_when_it_is_off) {
  CHECK(!trace::is_on());
  trace::record({.kind = trace::Kind::Wait});
  CHECK_EQ(trace::text("nobody reads this"), 0u);
  CHECK_EQ(trace::path(), std::string());
}

TEST(trace_is_read_while_it_goes_on_and_afterwards) {
  Traced traced(8);
  const uint32_t name = trace::text("bucket 3");
  CHECK_EQ(trace::text("bucket 3"), name);
  trace::record({.kind = trace::Kind::Bucket,
                 .begin = 5,
                 .end = 9,
                 .group = 1,
                 .lane = 1,
                 .place = 3,
                 .epoch = 2,
                 .detail = 4096,
                 .text = name});
  const Read read(traced.path);
  CHECK_EQ(read.recorded, 1u);
  CHECK_EQ(read.ended, 0u);
  CHECK(read.texts == (std::vector<std::string>{"about", "bucket 3"}));
  CHECK(read.events ==
        (std::vector<std::vector<uint64_t>>{{1, 5, 9, 1, 3, 2, 4096, name | uint64_t{3} << 32 | uint64_t{1} << 48}}));
  CHECK_EQ(read.texts[name - 1], std::string("bucket 3"));
  trace::stop();
  CHECK_EQ(Read(traced.path).ended, 1u);
}

TEST(trace_keeps_the_last_events_and_counts_all) {
  Traced traced(16);
  const auto record = [](int64_t at) { trace::record({.kind = trace::Kind::Message, .begin = at, .end = at}); };
  run_ranks(4, [&](int) {
    for (int64_t k = 0; k < 1000; ++k) record(k);
  });
  for (const auto& event : Read(traced.path).events) {
    if (event[0] > 4000 - 16) CHECK_EQ(event[1], event[2]);  // a lower number marks an event as torn
  }
  for (int64_t k = 4000; k < 4016; ++k) record(k);
  const Read read(traced.path);
  CHECK_EQ(read.recorded, 4016u);
  CHECK_EQ(read.events.size(), 16u);
  for (uint64_t i = 0; i < 16; ++i)
    CHECK(read.events[i] == (std::vector<uint64_t>{4001 + i, 4000 + i, 4000 + i, 0, 0, 0, 0, uint64_t{9} << 32}));
}

std::string maps() {
  std::ifstream file("/proc/self/maps");
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(trace_lets_go_of_the_file_of_the_one_before) {
  Traced(4);
  Traced traced(4);
  CHECK(contains(maps(), traced.path + "\n"));
  CHECK(!contains(maps(), traced.path + " (deleted)"));
}

TEST(trace_lets_go_later_of_a_file_that_the_kernel_did_not_let_go) {
  if (kSlowdown > 1) return;  // sanitizers need addresses
  CHECK(true_in_child([] {
    Traced(4);
    std::string text;
    {
      const Limited no_mmap(RLIMIT_AS, 4096);
      text = CHECK_THROWS(Traced(4), ErrorKind::InvalidUsage);
    }
    Traced after(4);
    return contains(text, "Cannot allocate memory") && !contains(maps(), after.path + " (deleted)");
  }));
}

TEST(trace_has_room_for_only_so_many_texts) {
  Traced traced(4);
  const std::string large(1 << 20, 'x');
  CHECK_EQ(trace::text(large), 0u);
  CHECK_EQ(trace::text("small"), 2u);
  CHECK_EQ(Read(traced.path).textless, 1u);
}

TEST(trace_says_where_it_can_not_be_written) {
  const auto text = CHECK_THROWS(trace::start("/nowhere/rank-0", 16, "", 0), ErrorKind::InvalidUsage);
  CHECK(contains(text, "/nowhere/rank-0: No such file or directory"));
  Traced traced(4);
  CHECK_THROWS(trace::start(traced.path + ".other", 16, "", 0), ErrorKind::InvalidUsage);
}

}  // namespace
}  // namespace syncengine::testing
