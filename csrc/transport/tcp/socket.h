// The few things done with TCP sockets. All are non-blocking and closed on exec.
#pragma once

#include <cstdint>

#include "base/fd.h"
#include "transport/tcp/ip.h"

namespace syncengine::tcp {

// On this address only. Throws InvalidUsage.
UniqueFd listen_on(const Ip& ip);
uint16_t port_of(const UniqueFd& listener);

// A connection that has begun; it is writable once it has succeeded or failed.
UniqueFd begin_connect(const Ip& from, const Ip& to, uint16_t port);
bool is_decided(const UniqueFd& socket);    // whether it has
int connect_error(const UniqueFd& socket);  // 0 if it has succeeded

void send_at_once(const UniqueFd& socket);     // nothing is held back to fill a packet
void keep_short_queue(int socket, int bytes);  // writable only while less than that is unsent

}  // namespace syncengine::tcp
