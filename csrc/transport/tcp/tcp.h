// The transport between hosts over TCP. Ranks are authenticated when they connect; what they send afterwards is neither
// encrypted nor signed (docs/SECURITY.md).
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/matching/heartbeat_monitor.h"
#include "transport/tcp/address.h"
#include "transport/tcp/socket.h"

namespace syncengine::tcp {

struct Options {
  std::string interface;  // where to listen, as choose_ip() has it; "" is loopback
  int sockets = 4;        // data connections a peer, 1 .. kMaxSockets; the same on all ranks
  bool checksum = false;  // CRC-32C of all data, beside TCP's own weak sum; the same on all ranks
  matching::HeartbeatTiming timing = {};
  double handshake = 5.0;    // seconds that a caller has to prove its identity
  double log_after = 5.0;    // seconds of connecting after which one line on stderr says to whom, and why not yet
  int unauthenticated = 64;  // limit of connections without that proof, beside those that are expected
  std::string secret;        // see load_secret()
  RankNames names;           // of the ranks of the job
  // Identifies the network whose addresses this rank sees, loopback's among them. Ranks that all give "" are on one.
  std::string network;
};

class Listener {
 public:
  explicit Listener(const Options& options);

  std::string address() const { return encode(address_); }  // for the other ranks; at most 256 bytes

 private:
  friend std::unique_ptr<Interhost> connect(Listener, int, const std::vector<std::string>&, Deadline,
                                            const std::function<void()>&);

  Options options_;
  Address address_;
  ParentFd fd_;
};

// Connects with every rank of `addresses`; an empty address is no peer's, and this rank's own is ignored. The port
// stays open as long as the Interhost lives (probe.h), but later callers are dropped. `interrupted` is called now and
// then and may throw. The caller must soon call step(), as nothing moves before.
std::unique_ptr<Interhost> connect(Listener listener, int rank, const std::vector<std::string>& addresses,
                                   Deadline deadline, const std::function<void()>& interrupted = {});

}  // namespace syncengine::tcp
