// Who makes up the communicator that follows a failed one: what one member does next, as a pure function of what it
// sees. Members are bits of a mask.
//
// A member arrives: it publishes where its part of the next communicator lies, and from then on does nothing but look.
// Whoever sees that all others have arrived or are gone proposes those who are left, by one compare-and-swap on a word
// that all see. The first proposal is the decision; so all agree, whoever dies and whenever, and nobody has to hear of
// it from anybody. A member that has not arrived after the others' patience is left out. It is fenced: it finds the
// decision when it comes, and the next communicator has nothing that it knows the place of.
//
// Thread-safety: pure.
#pragma once

#include <cstdint>

namespace syncengine {

struct Succession {
  enum class Do : uint8_t {
    Look,     // again, later
    Propose,  // `members`, and look again
    Join,     // the next communicator, of `members`
    Fenced,   // the others have gone on without this one
  };
  Do what;
  uint64_t members = 0;
};

// Of member `me`, which has arrived. `decision` is what has been decided, or 0, and was read first of all. `gone` are
// dead or will never come; a member may be gone after it has arrived. `impatient`: this one has waited long enough.
constexpr Succession succeed(int me, uint64_t everybody, uint64_t decision, uint64_t arrived, uint64_t gone,
                             bool impatient) {
  if (decision != 0) {
    const bool included = (decision >> me & 1) != 0;
    return {included ? Succession::Do::Join : Succession::Do::Fenced, decision};
  }
  const uint64_t left = everybody & ~gone;
  if ((left & ~arrived) != 0 && !impatient) return {Succession::Do::Look};
  return {Succession::Do::Propose, left & arrived};
}

}  // namespace syncengine
