// Who makes up the communicator that follows a failed one: what one member does next, as a pure function of what it
// sees. Members are bits of a mask, and so are hosts.
//
// Each host lists its members, once. A member arrives: it publishes where its part of the next communicator lies, and
// from then on does nothing but look. Whoever sees that all others of its host have arrived or are gone lists those who
// are left, by one compare-and-swap on a word that they all see. The first list counts. A member that has not arrived
// after the others' patience is left out. It is fenced: it finds the list when it comes, and the next communicator has
// nothing that it knows the place of.
//
// Hosts then agree on which of them go on. Each host has one word: the hosts without which it goes on, to which members
// only add, and its own bit once that is decided. Every member tells all members of other hosts each change, before it
// does anything else. A host decides when all that it goes on with have told the same word, and the others take its
// decision over. A host hears nothing of those without which it goes on. So hosts that are left decide alike, whoever
// dies and whenever. On one host nothing is left to agree on: its list is the decision.
//
// A host that can't be reached may live, however its connections have ended. So hosts go on without it only if they had
// more than half of all members, or half of them with the first, or if its members are known to have ended: two parts
// of the members never go on beside each other.
//
// Thread-safety: pure.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace syncengine {

// What a host's members have in common.
struct HostVerdict {
  uint64_t members = 0;  // of this host, once it has listed them, and of the hosts that have told it theirs
  uint64_t word = 0;     // the hosts without which it goes on; its own bit: decided
  bool operator==(const HostVerdict&) const = default;
};

// What a member sees.
struct Outlook {
  int me = 0;                       // a member
  size_t host = 0;                  // its own
  std::vector<uint64_t> hosts;      // of each host its members
  HostVerdict own;                  // `word` was read before `members`, and both before all else
  std::vector<HostVerdict> others;  // of each host what it has told last; the own one is not used
  uint64_t arrived = 0;             // of the own host
  // Members that will never come: of the own host the dead, of others those that can't be reached any more. `ended` are
  // those of them whose processes are known to have ended. Whoever is gone may have arrived.
  uint64_t gone = 0, ended = 0;
  // Nothing has changed for long enough: to leave out a member of the own host; and another host, whose members have
  // waited for each other before.
  bool impatient = false, tired = false;
  bool operator==(const Outlook&) const = default;
};

// Of its own verdict, what it tells others: its list and its word, and who goes on once that is decided.
constexpr HostVerdict to_tell(const HostVerdict& own, size_t host, uint64_t locals) {
  return {.members = own.word >> host & 1 ? own.members : own.members & locals, .word = own.word};
}

struct Succession {
  enum class Do : uint8_t {
    Look,    // again, later
    List,    // `value`: of the own host, unless somebody has; and look again
    State,   // `value`, in the place of the host's word that was read; and look again
    Join,    // the next communicator, of the members `value`
    Fenced,  // the members `value` have gone on without this one
    Few,     // the members `value` may live, and go on
  };
  Do what;
  uint64_t value = 0;
};

// Of member `me`, which has arrived.
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
  // Whether nobody acts for a host.
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
    if (next & bit) continue;  // of words that exclude each other only the first is taken
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
  bool may_go_on = missing < 0 || (missing == 0 && (with & 1) != 0);
  if (!may_go_on) {
    may_go_on = true;
    for (size_t host = 0; host < sees.hosts.size(); ++host)
      if (without >> host & 1) may_go_on &= all_in(sees.ended, host);
  }
  if (may_go_on) return {Do::State, without | own_bit};
  return {sees.tired ? Do::Few : Do::Look, members_of(without)};
}

}  // namespace syncengine
