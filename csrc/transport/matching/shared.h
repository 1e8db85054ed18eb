// State that an endpoint's parts share. Under its progress lock, but for `rank` and `names`, which never change.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "base/checked.h"
#include "base/deadline.h"
#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/matching/frame.h"

namespace syncengine::matching {

struct Shared {
  int rank = -1;
  RankNames names = {};
  bool checksum = false;                                              // CRC-32C of everything that is sent
  bool news = false;                                                  // the engine is to be told
  std::vector<Interhost::Message> heard;                              // messages on their way to the engine
  std::string log;                                                    // lines for stderr, once no lock is held
  std::vector<std::byte> scratch = std::vector<std::byte>(64 << 10);  // takes bytes that nobody wants any more
};

// Set when this process is about to end. A goodbye then says so, since a rank that only leaves may connect again.
inline std::atomic<bool> process_ends{false};

inline Frame goodbye() { return {.kind = Kind::Goodbye, .size = process_ends}; }

inline Error garbage(const Shared& shared, int peer, const std::string& what) {
  return {ErrorKind::PeerLost, shared.names(peer) + " sent " + what + kDamaged + "; it was given up" +
                                   (shared.checksum ? "" : " (SYNCENGINE_CHECKSUM=1 tells more)")};
}

inline Error size_mismatch(const RankNames& names, int from, uint64_t sent, int to, uint64_t wanted) {
  return {ErrorKind::Mismatch, names(from) + " sends " + std::to_string(sent) + " bytes where " + names(to) +
                                   " expects " + std::to_string(wanted)};
}

// Ranges of tags that this side, the peer or both have withdrawn. What still comes for tags withdrawn here is dropped.
//
// A range is forgotten once both sides have withdrawn it and everything has come that the peer had sent without being
// asked. So only ranges are kept that one side still uses. Ranges are equal or disjoint. Thread-safety: under the
// endpoint's progress lock.

class Withdrawals {
 public:
  Withdrawals(const Shared& shared, int peer) : shared_(shared), peer_(peer) {}

  bool is_withdrawn(uint64_t tag) const;
  void withdraw(uint64_t first, uint64_t last);
  void hear(const Frame& frame);  // the peer's Withdrawn
  void count_eager();             // another Eager of the peer's has come whole
  size_t size() const { return ranges_.size(); }

 private:
  struct TagRange {
    uint64_t last = 0;
    bool here = false, there = false;
    uint32_t eagers = 0;  // Eagers that the peer had sent, if `there`
  };
  bool is_over(const TagRange& range) const;

  const Shared& shared_;
  int peer_;
  uint32_t eagers_ = 0;                  // Eagers that have come; only differences matter
  std::map<uint64_t, TagRange> ranges_;  // by first tag
  size_t awaited_ = 0;                   // ranges withdrawn on both sides, with Eagers still to come
};

}  // namespace syncengine::matching
