// The agreement of Communicator::shrink(): see succession_walk.h.

#include "engine/hosts/succession.h"

#include <cstdio>
#include <utility>
#include <vector>

#include "succession_walk.h"
#include "test.h"

namespace syncengine {

namespace {

void walk(const char* what, std::vector<uint64_t> hosts, int losses, int suspicions, int cuts = 0) {
  std::printf("  succession, %s: %zu states\n", what,
              succession_walk::Walk(std::move(hosts), losses, suspicions, cuts).run());
}

TEST(succession_agrees_on_one_host) { walk("one host, two lost, two given up", {7}, 2, 2); }

TEST(succession_agrees_over_two_hosts) {
  walk("2+1, two lost", {3, 4}, 2, 0);
  if (testing::kSlowdown == 1) walk("2+1, one lost, one given up", {3, 4}, 1, 1);
}

TEST(succession_agrees_over_three_hosts) {
  if (testing::kSlowdown == 1)
    walk("1+1+1, two lost", {1, 2, 4}, 2, 0);
  else
    walk("1+1+1, one lost", {1, 2, 4}, 1, 0);
}

TEST(succession_agrees_where_a_connection_is_cut) {
  walk("1+1, one lost, one given up, one cut", {1, 2}, 1, 1, 1);
  walk("2+1, one cut", {3, 4}, 0, 0, 1);
  walk("2+1, one lost, one cut", {3, 4}, 1, 0, 1);
}

TEST(succession_agrees_where_one_of_three_connections_is_cut) {
  walk("1+1+1, one cut", {1, 2, 4}, 0, 0, 1);
  if (testing::kSlowdown == 1) walk("1+1+1, one lost, one cut", {1, 2, 4}, 1, 0, 1);
}

HostVerdict told(uint64_t members, uint64_t word) { return {members, word}; }

// Where nobody dies, but slowly, all are still there afterwards.
TEST(succession_leaves_nobody_out_who_comes_in_time) {
  using Do = Succession::Do;
  Outlook sees{.me = 0, .host = 0, .hosts = {7}, .others = {told(0, 0)}, .arrived = 3};
  CHECK(succeed(sees).what == Do::Look);
  sees.impatient = true;
  CHECK(succeed(sees).what == Do::List);
  CHECK_EQ(succeed(sees).value, uint64_t{3});
  sees.impatient = false;
  sees.arrived = 7;
  CHECK_EQ(succeed(sees).value, uint64_t{7});
  sees.gone = 4;  // it died after it had arrived
  CHECK_EQ(succeed(sees).value, uint64_t{3});
  sees.own = told(6, 0);
  CHECK(succeed(sees).what == Do::Fenced);
  sees.me = 1;
  CHECK(succeed(sees).what == Do::State);
  CHECK_EQ(succeed(sees).value, uint64_t{1});
  sees.own.word = 1;
  CHECK(succeed(sees).what == Do::Join);
  CHECK_EQ(succeed(sees).value, uint64_t{6});
}

// Hosts 0 (members 0, 1), 1 (2) and 2 (3), of whom host 0 and then host 1 are lost to host 2.
TEST(succession_goes_on_only_where_the_others_can_not) {
  using Do = Succession::Do;
  Outlook sees{
      .me = 3, .host = 2, .hosts = {3, 4, 8}, .own = told(15, 1), .others = {told(3, 0), told(4, 1), told(0, 0)}};
  sees.gone = sees.ended = 3;
  CHECK(succeed(sees).what == Do::State);
  CHECK_EQ(succeed(sees).value, uint64_t{1 | 4});  // host 0 has ended: decided
  sees.ended = 1;
  CHECK(succeed(sees).what == Do::Look);  // half of all, and member 0 may live
  sees.tired = true;
  CHECK(succeed(sees).what == Do::Few);
  CHECK_EQ(succeed(sees).value, uint64_t{3});
  sees.others[0] = told(7, 1 | 4);  // it has decided, without host 2
  CHECK(succeed(sees).what == Do::Fenced);
  CHECK_EQ(succeed(sees).value, uint64_t{7});
}

}  // namespace

}  // namespace syncengine
