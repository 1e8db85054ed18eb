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

}  // namespace syncengine::testing
