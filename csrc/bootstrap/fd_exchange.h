// Passes each rank's shared memory to its peers on the same host: a descriptor over an abstract AF_UNIX socket, to
// processes of the same user that know the secret in the address. Nothing appears in a file system.
//
// Ownership: the caller owns the descriptor it gives and those it gets. Thread-safety: one thread.
// Failure: throws InvalidUsage, Timeout or PeerLost, naming the ranks; peers that have been served are told.
#pragma once

#include <array>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/texts.h"

namespace syncengine::local_socket {

// Abstract AF_UNIX sockets, which have a name but no file and which no forked child keeps, and descriptors that are
// passed over them. No call blocks.
//
// Thread-safety: any thread. Failure: throws InvalidUsage if a resource of this process or machine has run out,
// or a sandbox forbids the call; failures that the other side can cause are return values.

ParentFd listen(const std::string& name);

enum class Called : uint8_t { Connected, Refused, NotYet };  // NotYet: the listener's queue is full
Called call(const std::string& name, ParentFd& socket);
// The next caller's socket, or an empty descriptor if nobody calls.
ParentFd accept(const ParentFd& listener);

// Whether the process at the other end of `socket` runs as the same user.
bool same_user(const ParentFd& socket);

enum class Got : uint8_t { Nothing, Message, BrokenOff };  // BrokenOff: also by a message of another size
Got receive(int socket, void* message, size_t bytes);
bool send(int socket, const void* message, size_t bytes);  // false: the other side is gone

// NotYet: the socket is full, or this user has as many unreceived descriptors as Linux allows (RLIMIT_NOFILE).
enum class Sent : uint8_t { Done, NotYet, BrokenOff };
Sent send_fd(int socket, const void* message, size_t bytes, int fd);
// `who` names this rank in the error that is thrown if this process can't open another descriptor.
Got receive_fd(int socket, void* message, size_t bytes, UniqueFd& fd, const std::string& who);

}  // namespace syncengine::local_socket

namespace syncengine {

// The first message in each direction of a connection within a host, which proves that the sender is a rank of the job:
// any process in the network namespace can find an abstract name and connect to it.
//
// The caller sends its greeting first; the listener answers with its own, and with its memory's descriptor. Each
// greeting repeats the secret that stands in the receiver's address. If a stranger listens under the name of a rank
// whose process has ended, all that it learns is that rank's secret, which is of no use any more.
struct Greeting {
  static constexpr size_t kSecretBytes = 64;
  uint32_t magic = 0x73796e63;  // "sync"
  int32_t rank = -1;            // the sender's
  std::array<char, kSecretBytes> secret{};
};

// Returns the error for the peers of `who` when `thrown` ends its init(): an Error about other ranks (no InvalidUsage)
// as it is, others as Aborted with their text. If `thrown` is null or no std::exception, `who` is said to have left.
Error for_peers(const std::string& who, const std::exception_ptr& thrown);

class FdExchange {
 public:
  FdExchange();  // listens under a random name

  // The socket's name and a new secret, to be given to the peers alone: "name/secret", shorter than kMostAddress.
  std::string address() const { return name_ + "/" + secret_; }
  static constexpr size_t kMostAddress = 144;
  const std::string& name() const { return name_; }
  // The process that has made `address`, as process_id() names it (bootstrap/host.h).
  static std::string process_of(const std::string& address);

  // Gives the descriptor `own` to every other rank and returns theirs by rank, with none for this rank. `addresses` is
  // by rank, and empty for ranks that are left out. `interrupted` is called now and then and may throw.
  std::vector<UniqueFd> exchange(int rank, const std::vector<std::string>& addresses, int own, Deadline deadline,
                                 const std::function<void()>& interrupted, const RankNames& names = {});

 private:
  std::string name_, secret_;
  ParentFd listener_;
};

}  // namespace syncengine
