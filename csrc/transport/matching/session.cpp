#include "transport/matching/session.h"

namespace syncengine::matching {

void Session::add(Frame frame, std::string_view text) {
  frame.payload = static_cast<uint32_t>(text.size());
  frame.checksum = checksum_of(text);
  out += encode(frame, shared.checksum);
  out += text;
}

void Session::add_abort(const Error& error) {
  add({.kind = Kind::Abort, .size = static_cast<uint32_t>(error.kind())},
      std::string(error.what()).substr(0, kMaxAbort));
}

uint32_t Session::checksum_of(std::string_view text) const {
  if (!shared.checksum || text.empty()) return 0;
  return crc32c(reinterpret_cast<const std::byte*>(text.data()), text.size());
}

void Session::on_control(const Frame& frame, std::string_view text) {
  if (checksum_of(text) != frame.checksum) throw garbage(shared, rank, "a message whose checksum differs");
  const bool mismatch = static_cast<ErrorKind>(frame.size) == ErrorKind::Mismatch;
  switch (frame.kind) {
    case Kind::Message:
      shared.heard.push_back({rank, std::string(text)});
      shared.news = true;
      break;
    case Kind::Ready: return outbox.on_ready(frame);
    case Kind::Ask: return inbox.on_ask(frame);
    case Kind::Credit: return outbox.on_credit(frame);
    case Kind::Withdrawn: return withdrawals.hear(frame);
    case Kind::Goodbye:
      end = frame.size == 0 ? Interhost::End::Left : Interhost::End::Ended;
      return life.on(ConnectionLifecycle::HearGoodbye);
    case Kind::Abort:
      throw Error(mismatch ? ErrorKind::Mismatch : ErrorKind::PeerLost,
                  name() + " closed its connection to " + shared.names(shared.rank) + ": " + std::string(text));
    default: break;  // a heartbeat: its arrival is all that it says
  }
}

void Session::withdraw(uint64_t first, uint64_t last, const Error& error) {
  outbox.withdraw(first, last, error);
  inbox.withdraw(first, last, error);
}

void Session::take_leave(const Error& error) {
  life.on(ConnectionLifecycle::Leave);
  outbox.fail_unready(error);
  inbox.fail(error);
}

}  // namespace syncengine::matching
