#include "cuda/shared_pages.h"

#include <sys/stat.h>

#include <cstring>

#include "base/memory.h"
#include "bootstrap/fd_exchange.h"
#include "bootstrap/host.h"

namespace syncengine::cuda {

namespace {

constexpr size_t kPage = 4096;

struct Address {
  char fd_exchange[FdExchange::kMostAddress] = {};
  char host[kMostHostKey] = {};
  uint64_t bytes = 0;
};

void put(char* field, size_t size, const std::string& text) { text.copy(field, size - 1); }

Mapping map_peer(int fd, size_t bytes) {
  struct stat status{};
  if (!has_fixed_size(fd) || fstat(fd, &status) != 0 || static_cast<size_t>(status.st_size) != bytes)
    throw Error(ErrorKind::InvalidUsage, "a peer sent shared memory of another size, or unsealed");
  return Mapping(fd, bytes);
}

}  // namespace

std::vector<std::string> gather(Communicator& communicator, const std::string& own, const char* what,
                                const std::function<void()>& interrupted) {
  std::string input = own, output(own.size() * communicator.size(), '\0');
  Operation operation{.collective = Collective::AllGather,
                      .dtype = DType::UInt8,
                      .input = {input.data(), input.size()},
                      .output = {output.data(), output.size()}};
  operation.describe = [what] { return std::string(what); };
  operation.layout_hash = 0x63756461;  // "cuda": no other all_gather matches it
  communicator.run(std::move(operation), interrupted);
  std::vector<std::string> all;
  for (int rank = 0; rank < communicator.size(); ++rank) all.push_back(output.substr(rank * own.size(), own.size()));
  return all;
}

SharedPages::SharedPages(Communicator& communicator, size_t bytes, const std::function<void()>& interrupted) {
  bytes = round_up(bytes, kPage);
  FdExchange fd_exchange;
  Address own;
  put(own.fd_exchange, sizeof(own.fd_exchange), fd_exchange.address());
  put(own.host, sizeof(own.host), host_key(""));
  own.bytes = bytes;
  const auto addresses = gather(communicator, own, "connecting GPU ranks", interrupted);
  std::vector<std::string> fd_exchanges;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    if (std::strcmp(addresses[rank].host, own.host) != 0)
      throw Error(ErrorKind::InvalidUsage,
                  "CUDA tensors need all ranks on one host, and rank " + std::to_string(rank) +
                      " of this communicator is on another one: split() it by host, or reduce CPU tensors");
    fd_exchanges.emplace_back(addresses[rank].fd_exchange);
  }
  const UniqueFd memory = create_sealed_memfd("syncengine-cuda", bytes);
  std::vector<UniqueFd> descriptors;
  try {
    const Deadline deadline = Deadline::after(communicator.timeout());
    descriptors = fd_exchange.exchange(communicator.rank(), fd_exchanges, memory.get(), deadline, interrupted);
  } catch (const Error&) {
    communicator.check_peers();  // a rank that is gone because another one died is not the cause
    throw;
  }
  for (int rank = 0; rank < communicator.size(); ++rank)
    mappings_.push_back(rank == communicator.rank() ? Mapping(memory.get(), bytes)
                                                    : map_peer(descriptors[rank].get(), bytes));
}

}  // namespace syncengine::cuda
