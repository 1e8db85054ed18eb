// Abstract AF_UNIX sockets, which have a name and no file, and descriptors that are passed over them. Nothing here
// blocks.
//
// Thread-safety: any thread. Failure: throws InvalidUsage if this process or machine has run out of a resource; what
// the other side may cause is returned.
#pragma once

#include <cstdint>
#include <string>

#include "base/fd.h"

namespace syncengine::local_socket {

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
Sent send_fd(const UniqueFd& socket, int32_t rank, int fd);
// `who`: for the error, if this process can't open another descriptor.
Got receive_fd(const UniqueFd& socket, int32_t rank, UniqueFd& fd, const std::string& who);

}  // namespace syncengine::local_socket
