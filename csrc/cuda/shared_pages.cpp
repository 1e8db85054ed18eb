#include "cuda/shared_pages.h"

#include <utility>

#include "base/checked.h"
#include "bootstrap/fd_exchange.h"

namespace syncengine::cuda {

// The first rank's memory is taken. What the others offer is ignored, and has never taken a page.
Mapping share_pages(Communicator& communicator, size_t bytes, const std::function<void()>& interrupted) {
  struct MemoryAddress {
    char text[FdExchange::kMostAddress] = {};
  } own;
  FdExchange fd_exchange;
  fd_exchange.address().copy(own.text, sizeof(own.text) - 1);
  std::vector<std::string> addresses;
  for (const MemoryAddress& address : gather(communicator, own, "connecting GPU ranks", interrupted))
    addresses.push_back(checked_text(address.text));
  UniqueFd memory = create_sealed_memfd("syncengine-cuda", bytes);
  try {
    const Deadline deadline = Deadline::after(communicator.timeout());
    auto memories = fd_exchange.exchange(communicator.rank(), addresses, memory.get(), deadline, interrupted);
    if (communicator.rank() != 0) memory = std::move(memories[0]);
  } catch (const Error&) {
    communicator.check_peers();  // a rank that left because another had died is not the cause
    throw;
  }
  if (sealed_size(memory.get()) != bytes)
    throw Error(ErrorKind::InvalidUsage, "a peer sent shared memory of another size, or unsealed");
  return Mapping(memory.get(), bytes);
}

}  // namespace syncengine::cuda
