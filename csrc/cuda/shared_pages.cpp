#include "cuda/shared_pages.h"

#include <sys/stat.h>

#include <string>
#include <utility>

#include "base/checked.h"
#include "bootstrap/fd_exchange.h"
#include "transport/shm/pages.h"

namespace syncengine::cuda {

void gather(Communicator& communicator, SpanList own, SpanList all, const char* what,
            const std::function<void()>& interrupted) {
  Operation operation{
      .collective = Collective::AllGather, .dtype = DType::UInt8, .input = std::move(own), .output = std::move(all)};
  operation.describe = [what] { return std::string(what); };
  operation.layout_hash = 0x63756461;  // "cuda": no other all_gather matches it
  communicator.run(std::move(operation), interrupted);
}

// The first rank makes the memory, and the file descriptors that the others offer are ignored.
Mapping share_pages(Communicator& communicator, size_t bytes, const std::function<void()>& interrupted) {
  bytes = round_up(bytes, shm::kPage);
  struct MemoryAddress {
    char text[FdExchange::kMostAddress] = {};
  } own;
  FdExchange fd_exchange;
  fd_exchange.address().copy(own.text, sizeof(own.text) - 1);
  std::vector<std::string> addresses;
  for (const MemoryAddress& address : gather(communicator, own, "connecting GPU ranks", interrupted))
    addresses.push_back(checked_text(address.text));
  const bool is_first = communicator.rank() == 0;
  UniqueFd memory = create_sealed_memfd("syncengine-cuda", is_first ? bytes : shm::kPage);
  try {
    const Deadline deadline = Deadline::after(communicator.timeout());
    auto memories = fd_exchange.exchange(communicator.rank(), addresses, memory.get(), deadline, interrupted);
    if (!is_first) memory = std::move(memories[0]);
  } catch (const Error&) {
    communicator.check_peers();  // a rank that left because another had died is not the cause
    throw;
  }
  struct stat status{};
  if (sealed_size(memory.get()) == 0 || fstat(memory.get(), &status) != 0 ||
      static_cast<size_t>(status.st_size) != bytes)
    throw Error(ErrorKind::InvalidUsage, "a peer sent shared memory of another size, or unsealed");
  return Mapping(memory.get(), bytes);
}

}  // namespace syncengine::cuda
