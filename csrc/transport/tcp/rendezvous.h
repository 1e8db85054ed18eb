// Opens the connections between a rank and its peers: of each pair the higher rank calls the lower. Whoever else calls
// is dropped and disturbs nobody.
//
// Ownership: the listener is the caller's. Thread-safety: one thread. Failure: throws, naming the ranks.
#pragma once

#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

// A peer's authenticated connections: the first for control, the others for data.
using Sockets = std::vector<UniqueFd>;

class Rendezvous {
 public:
  // `peers` by rank; the own rank is not among them.
  Rendezvous(const Options& options, int rank, const Address& own, std::map<int, Address> peers, int listener);

  std::map<int, Sockets> run(Deadline deadline, const std::function<void()>& interrupted);

 private:
  // One side of a connection that is being opened.
  struct Call {
    int peer = -1;
    int connection = 0;
    UniqueFd fd;
    std::unique_ptr<ClientHandshake> client;  // or
    std::unique_ptr<ServerHandshake> server;
    bool connecting = false;
    std::string read;
    Clock::time_point limit = Clock::time_point::max();  // when it is dropped
    Clock::time_point again{};                           // when a call that broke off is tried anew
    Handshake& handshake() { return client ? static_cast<Handshake&>(*client) : *server; }
  };

  void accept_callers();
  bool advance(Call& call);  // true: it has ended
  void dial(Call& call);
  void greet(Call& call);
  bool talk(Call& call, int& code);
  bool settle(Call& call);
  void break_off(Call& call, int code);
  void wait_for_descriptors(int code);
  void doubt(int peer, const std::string& what);
  void look_after_doubted();
  [[noreturn]] void throw_other_secret(int peer) const;
  bool is_missing(int peer) const;
  std::string missing_names() const;

  const Options& options_;
  int rank_;
  Address own_;
  std::map<int, Address> peers_;
  std::map<int, PairKeys> keys_;
  int listener_;
  std::map<int, Sockets> sockets_;
  size_t missing_ = 0;                  // connections
  std::list<Call> calls_;               // to lower ranks
  std::list<Call> unauthenticated_;     // from whoever calls
  std::set<std::string> nonces_;        // of hellos with a ticket: none is good twice
  std::map<int, std::string> reasons_;  // why the last call to or from a peer failed
  struct Doubt {
    UniqueFd probe = {};  // a call, to see whether the rank still listens
    Clock::time_point again = {};
  };
  std::map<int, Doubt> doubted_;  // ranks in whose names somebody has called who could not prove it
  struct Full {
    Clock::time_point since, again = {};
  };
  std::optional<Full> full_;  // no descriptor was left
};

}  // namespace syncengine::tcp
