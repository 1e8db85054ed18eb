// The few operations on TCP sockets that are needed. All sockets are non-blocking and closed on exec.
#pragma once

#include <cstdint>

#include "base/descriptors.h"
#include "transport/tcp/address.h"

namespace syncengine::tcp {

// Listens on this address only. Throws InvalidUsage.
ParentFd listen_on(const Ip& ip);
uint16_t port_of(const ParentFd& listener);
ParentFd accept_on(int listener);

// Begins to connect; the socket becomes writable once that has succeeded or failed.
ParentFd begin_connect(const Ip& from, const Ip& to, uint16_t port);
bool is_decided(const ParentFd& socket);    // whether it has succeeded or failed
int connect_error(const ParentFd& socket);  // 0 if it has succeeded

// Whether the connection was refused by ICMP, which any machine on the way may send. Known only if note_icmp() has told
// the kernel to report it.
void note_icmp(const ParentFd& socket);
bool has_icmp(const ParentFd& socket);

void send_at_once(const ParentFd& socket);     // the kernel holds nothing back to fill a packet
void keep_short_queue(int socket, int bytes);  // `socket` is writable only while less than `bytes` are unsent

}  // namespace syncengine::tcp
