// One rank's part in an exchange of descriptors: it connects to every peer for its memory, and serves those that
// connect. Single steps, none of which blocks, so that no two ranks wait for each other.
//
// Thread-safety: one thread. Failure: throws as bootstrap/fd_exchange.h says.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/texts.h"

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

// How a rank ended connecting, for the ranks that have its memory and still wait for another one's.

struct Goodbye {
  int32_t failed = 0;
  ErrorKind kind = ErrorKind::Aborted;
  char text[248] = {};
};

// Of a rank: where it listens, and what those say who know it.
struct RendezvousPoint {
  std::string name, secret;
};

class LocalRendezvous {
 public:
  // `places` has the peers, by rank, and this rank; `own` is the descriptor to hand out.
  LocalRendezvous(int rank, std::map<int, RendezvousPoint> places, int own, const UniqueFd& listener, RankNames names);

  // What can be done now. Throws if a peer is lost.
  void step();
  bool over() const { return unserved_.empty() && has_all(); }
  // Until something may have come.
  void wait() const;
  [[noreturn]] void throw_timeout() const;

  // By rank; once it is over.
  std::map<int, UniqueFd> take_memories();
  // Those that have this rank's memory, for last words.
  const std::vector<UniqueFd>& served() const { return served_; }

 private:
  struct Call {
    enum class Stage : uint8_t { Unreached, Greeted, Received, Over };
    Stage stage = Stage::Unreached;
    UniqueFd socket = {}, memory = {};
    bool misses_memory() const { return stage < Stage::Received; }
  };
  struct Visitor {
    UniqueFd socket;
    int rank = -1;  // once it has shown that it is one
    bool is_owed() const { return rank >= 0; }
  };

  void advance(int peer, Call& call);
  void reach(int peer, Call& call);
  // Whether the visitor is to be forgotten: served, or no rank.
  bool advance(Visitor& visitor);
  void accept();
  bool has_all() const;
  Greeting greeting_to(int peer) const;
  // Whether `greeting` is of that rank, and says this one's secret.
  bool is_of(int peer, const Greeting& greeting) const;

  const int rank_, own_;
  const RankNames names_;
  const std::map<int, RendezvousPoint> places_;
  const UniqueFd& listener_;
  std::map<int, Call> calls_;
  std::list<Visitor> visitors_;  // the oldest first
  std::set<int> unserved_, unreachable_, lost_;
  std::vector<UniqueFd> served_;
};

}  // namespace syncengine
