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

// Abstract AF_UNIX sockets, which have a name and no file, and descriptors that are passed over them. Nothing here
// blocks.
//
// Thread-safety: any thread. Failure: throws InvalidUsage if this process or machine has run out of a resource; what
// the other side may cause is returned.

UniqueFd listen(const std::string& name);

enum class Called : uint8_t { Connected, Refused, NotYet };  // NotYet: the listener's queue is full
Called call(const std::string& name, UniqueFd& socket);
// Nothing if nobody calls.
UniqueFd accept(const UniqueFd& listener);

// Whether the other side is of this user.
bool same_user(const UniqueFd& socket);

enum class Got : uint8_t { Nothing, Message, BrokenOff };  // BrokenOff: also by a message of another size
Got receive(const UniqueFd& socket, void* message, size_t bytes);
bool send(const UniqueFd& socket, const void* message, size_t bytes);  // false: the other side is gone

// NotYet: the kernel holds as many descriptors of this user that nobody has received as it allows (RLIMIT_NOFILE).
enum class Sent : uint8_t { Done, NotYet, BrokenOff };
Sent send_fd(const UniqueFd& socket, const void* message, size_t bytes, int fd);
// `who`: for the error, if this process can't open another descriptor.
Got receive_fd(const UniqueFd& socket, void* message, size_t bytes, UniqueFd& fd, const std::string& who);

}  // namespace syncengine::local_socket

namespace syncengine {

// What a process says first on a connection inside a host, so that the other one knows it for a rank of the job: any
// process in the network namespace can read a name of the abstract namespace, and connect to it. The caller says this
// to the listener, which answers with its memory and the same; each says the other one's secret, which stands in the
// other one's address. Who listens in the place of a rank that has ended learns a secret that opens nothing any more.
struct Greeting {
  static constexpr size_t kSecretBytes = 64;
  uint32_t magic = 0x73796e63;  // "sync"
  int32_t rank = -1;            // of who says it
  std::array<char, kSecretBytes> secret{};
};

// What the peers of `who` raise when this exception ends its init(): as it is if it is about other ranks, else in
// words. None, or one of no class that is known: it was left.
Error for_peers(const std::string& who, const std::exception_ptr& thrown);

class FdExchange {
 public:
  FdExchange();  // listens under a random name

  // The socket's name and a new secret, for the peers alone: "name/secret", shorter than kMostAddress.
  std::string address() const { return name_ + "/" + secret_; }
  static constexpr size_t kMostAddress = 144;
  const std::string& name() const { return name_; }
  // Whose address this is, as bootstrap/host.h names processes.
  static std::string process_of(const std::string& address);

  // Gives `own` to every other rank and returns theirs by rank (nothing for this one). `addresses` by rank; those
  // without one are left out.
  // `interrupted` is called now and then and may throw. Messages say `names`.
  std::vector<UniqueFd> exchange(int rank, const std::vector<std::string>& addresses, int own, Deadline deadline,
                                 const std::function<void()>& interrupted, const RankNames& names = {});

 private:
  std::string name_, secret_;
  UniqueFd listener_;
};

}  // namespace syncengine
