// Decides who makes up the communicator that follows a failed one: the next act of one member, as a pure function of
// what it sees. Members are bits of a mask, and so are hosts.
//
// Each host lists its members, once. A member arrives: it publishes where its part of the next communicator lies, and
// from then on does nothing but look. A member that sees that all others of its host have arrived or are gone lists
// those that are left, by one compare-and-swap on a word that they all see. The first list counts. A member that has
// not arrived after the others' patience is left out. Such a member is fenced: it finds the list when it comes, and it
// does not know where anything of the next communicator lies.
//
// Hosts then agree on which of them go on. Each host has one word: the hosts without which it goes on, to which members
// only add, and its own bit once that is decided. Every member tells all members of other hosts each change, before it
// does anything else. A host decides when all hosts with which it goes on have told the same word, and the others take
// over its decision. A host ignores hosts without which it goes on, but is fenced if they decide to go on without it.
// So hosts that are left decide alike, whoever dies and whenever. A single host agrees with nobody: its list decides.
//
// A host that can't be reached may live, however its connections have ended. So hosts go on without it only if they
// have more than half of all members, or half of them with the first one among these, or if its members are known to
// have ended: so two parts of the members never both go on.
//
// Thread-safety: pure.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncengine {

// A host's decisions so far about the next communicator, in two words that its members share.
struct HostVerdict {
  uint64_t members = 0;  // of this host, once listed, and of hosts that have told their lists
  uint64_t word = 0;     // the hosts without which it goes on; the own bit means decided
  bool operator==(const HostVerdict&) const = default;
};

// Everything that a member sees when it decides on its next act.
struct Outlook {
  int me = 0;                       // a member
  size_t host = 0;                  // its own
  std::vector<uint64_t> hosts;      // of each host: its members
  HostVerdict own;                  // `word` was read before `members`, and both before all else
  std::vector<HostVerdict> others;  // of each host: its last verdict told; the own entry is unused
  uint64_t arrived = 0;             // of this host
  // `gone`: members that will never come; on this host those that have died or left, on others those that can't be
  // reached any more. `ended`: those of them that hold no communicator of the job, since their processes have ended or
  // shut down. Members that nobody waits for in shrink() count as both. A member that is gone may have arrived before.
  uint64_t gone = 0, ended = 0;
  // `impatient`: nothing has changed for so long that a member of this host may be left out. `tired`: for longer still,
  // so that another host may be left out, whose members have first waited for each other.
  bool impatient = false, tired = false;
  bool operator==(const Outlook&) const = default;
};

// The part of a host's verdict that it tells other hosts: its list and its word and, once that is decided, who goes on.
constexpr HostVerdict to_tell(const HostVerdict& own, size_t host, uint64_t locals) {
  return {.members = own.word >> host & 1 ? own.members : own.members & locals, .word = own.word};
}

struct Succession {
  enum class Do : uint8_t {
    Look,    // look again, later
    List,    // list `value` as the own host's members, unless a list exists; then look again
    State,   // put `value` in the place of the host's word that was read; then look again
    Join,    // make the next communicator, of the members `value`
    Fenced,  // the members `value` have gone on without this one
    Few,     // the members `value` may live, and go on
  };
  Do what;
  uint64_t value = 0;
};

// Decides on the next act of member `sees.me` in the agreement on who makes up the next communicator. That member has
// arrived.
constexpr Succession succeed(const Outlook& sees) {
  using Do = Succession::Do;
  const uint64_t own_bit = uint64_t{1} << sees.host, locals = sees.hosts[sees.host];
  const uint64_t listed = sees.own.members & locals;
  if (listed == 0) {
    const uint64_t left = locals & ~sees.gone;
    if ((left & ~sees.arrived) != 0 && !sees.impatient) return {Do::Look};
    return {Do::List, left & sees.arrived};
  }
  if ((listed >> sees.me & 1) == 0) return {Do::Fenced, listed};

  auto members_of = [&](uint64_t hosts) {
    uint64_t members = 0;
    for (size_t host = 0; host < sees.hosts.size(); ++host)
      if (hosts >> host & 1) members |= sees.hosts[host];
    return members;
  };
  // Whether all listed members of a host are lost, so that nobody acts for it.
  auto all_in = [&](uint64_t lost, size_t host) {
    const uint64_t its = sees.own.members & sees.hosts[host];
    return ((its != 0 ? its : sees.hosts[host]) & ~lost) == 0;
  };
  const uint64_t without = sees.own.word & ~own_bit;
  if (sees.own.word & own_bit) return {Do::Join, sees.own.members & ~members_of(without)};

  uint64_t next = without, differ = 0;
  for (size_t host = 0; host < sees.hosts.size(); ++host) {
    if (host == sees.host) continue;
    const uint64_t bit = uint64_t{1} << host;
    const auto& [members, word] = sees.others[host];
    const bool has_decided = (word & bit) != 0, without_this = (word & own_bit) != 0;
    if (has_decided && without_this) return {Do::Fenced, members & ~members_of(word & ~bit)};
    if (without & bit) continue;
    if (has_decided) return {Do::State, (word & ~bit) | own_bit};
    if (next & bit) continue;  // if words exclude each other, only the first is taken
    const bool is_told = (members & sees.hosts[host]) != 0 && !without_this;
    if (all_in(sees.gone, host))
      next |= bit;
    else if (is_told)
      next |= word;
    if (!is_told || word != without) differ |= bit;
  }
  if (sees.tired) next |= differ;
  if (next != without) return {Do::State, next};
  if (differ != 0) return {Do::Look};

  const uint64_t everybody = members_of(~uint64_t{0}), with = everybody & ~members_of(without);
  const int missing = std::popcount(everybody) - 2 * std::popcount(with);
  const bool outweighs = missing < 0 || (missing == 0 && (with & 1) != 0);
  bool all_ended = true;
  for (size_t host = 0; host < sees.hosts.size(); ++host)
    if (without >> host & 1) all_ended &= all_in(sees.ended, host);
  if (outweighs || all_ended) return {Do::State, without | own_bit};
  return {sees.tired ? Do::Few : Do::Look, members_of(without)};
}

}  // namespace syncengine
