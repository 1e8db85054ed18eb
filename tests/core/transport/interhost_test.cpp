// The in-memory Interhost passes the suite that the real ones pass.
#include "fake_interhost.h"
#include "interhost_conformance.h"

namespace syncengine::testing {

namespace {

Endpoints fake(int size) {
  auto network = FakeNetwork::create(size);
  Endpoints endpoints;
  for (int rank = 0; rank < size; ++rank) endpoints.push_back(network->endpoint(rank));
  return endpoints;
}

}  // namespace

INTERHOST_CONFORMANCE(fake_interhost, fake)

TEST(fake_interhost_can_be_cut_and_held) {
  auto network = FakeNetwork::create(2);
  Running zero(network->endpoint(0)), one(network->endpoint(1));
  std::byte byte{7}, got{};
  network->hold(true);
  auto receive = one->receive(0, 1, &got, 1);
  auto send = zero->send(1, 1, &byte, 1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!receive->ended() && !send->ended());
  network->hold(false);
  one.wait_done(receive);
  CHECK(got == byte);
  auto lost = one->receive(0, 2, &got, 1);
  network->cut(0);
  CHECK(contains(one.wait_failed(lost).what(), "rank 0 died"));
}

}  // namespace syncengine::testing
