#include "bootstrap/fd_exchange.h"

#include <map>

#include "base/interruption.h"
#include "base/sync_point.h"
#include "base/texts.h"
#include "bootstrap/goodbye.h"
#include "bootstrap/greeting.h"
#include "bootstrap/local_socket.h"
#include "bootstrap/process.h"
#include "bootstrap/rendezvous.h"

namespace syncengine {

namespace {

std::string random_text(size_t bytes) {
  std::string text;
  const Bytes32 random = random_bytes();
  for (size_t i = 0; i < bytes; ++i) {
    text += "0123456789abcdef"[random[i] >> 4];
    text += "0123456789abcdef"[random[i] & 15];
  }
  return text;
}

RendezvousPoint parse(const std::string& address) {
  const size_t slash = address.find('/');
  if (slash == std::string::npos) return {.name = address, .secret = {}};
  return {.name = address.substr(0, slash), .secret = address.substr(slash + 1)};
}

void say_goodbye(const std::vector<UniqueFd>& peers, const Goodbye& goodbye) {
  for (const auto& peer : peers) (void)local_socket::send(peer, &goodbye, sizeof(goodbye));
}

void say_goodbye(const std::vector<UniqueFd>& peers, ErrorKind kind, const std::string& text) {
  Goodbye goodbye{.failed = 1, .kind = kind};
  text.copy(goodbye.text, sizeof(goodbye.text) - 1);
  say_goodbye(peers, goodbye);
}

}  // namespace

Error for_peers(int rank, const Error& error) {
  if (error.kind() != ErrorKind::InvalidUsage) return error;
  return {ErrorKind::Aborted, "rank " + std::to_string(rank) + " failed in init: InvalidUsage: " + error.what()};
}

FdExchange::FdExchange()
    : name_("syncengine-" + process_id() + "-" + random_text(8)),
      secret_(random_text(32)),
      listener_(local_socket::listen(name_)) {}

std::vector<UniqueFd> FdExchange::exchange(int rank, const std::vector<std::string>& addresses, int own,
                                           Deadline deadline, const std::function<void()>& interrupted,
                                           const RankNames& names) {
  std::map<int, RendezvousPoint> places;
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    if (!addresses[peer].empty()) places[static_cast<int>(peer)] = parse(addresses[peer]);
  }
  places[rank] = {.name = name_, .secret = secret_};
  sync_point("listening");
  LocalRendezvous rendezvous(rank, std::move(places), own, listener_, names);
  try {
    for (bool first = true; !rendezvous.over(); first = false) {
      rendezvous.step();
      if (first) sync_point("connecting");
      if (rendezvous.over()) break;
      if (deadline.passed()) rendezvous.throw_timeout();
      rendezvous.wait();
      if (interrupted) interrupted();
    }
    listener_.reset();
    say_goodbye(rendezvous.served(), Goodbye{});
  } catch (const Error& error) {
    Error told = for_peers(names.global(rank), error);
    say_goodbye(rendezvous.served(), told.kind(), told.what());
    throw;
  } catch (const std::exception& error) {
    say_goodbye(rendezvous.served(), ErrorKind::Aborted, names(rank) + failure_text(error, "init()"));
    throw;
  } catch (...) {
    say_goodbye(rendezvous.served(), ErrorKind::Aborted, names(rank) + " left init()");
    throw;
  }
  std::vector<UniqueFd> memories(addresses.size());
  for (auto& [peer, memory] : rendezvous.take_memories()) memories[peer] = std::move(memory);
  return memories;
}

}  // namespace syncengine
