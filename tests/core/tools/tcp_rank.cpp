// One rank on TCP, alone in a process: for tests between network namespaces and for benchmarks.
//
//   tcp_rank <rank> <size> <mode> [name=value ...]
//
// It prints "address <hex>", reads a line of hex from each rank ("-" for none), prints "connected", and then:
//
// - exchange: all pairs swap `transfers` transfers of `bytes` and compare every byte, `rounds` times ("round <n>" each)
// - pump: ranks 0 and 1 send each other `rounds` x `bytes`, `transfers` at a time ("pumped <bytes> <seconds>")
// - raw: the same over the same sockets without protocol, which is what there is to reach
//
// At the end "done", or "error <kind> <seconds since the last round> <text>" and exit code 1.
// Settings: interface sockets checksum heartbeat silence secret timeout bytes transfers rounds pause.
#include <poll.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "interhost_running.h"
#include "transport/tcp/rendezvous.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace syncengine {

namespace {

using testing::Bytes, testing::pattern, testing::Running, testing::Transfer;

struct Settings {
  int rank = 0, size = 0;
  std::string mode;
  std::map<std::string, std::string> given;

  double number(const char* name, double otherwise) const {
    auto found = given.find(name);
    return found == given.end() ? otherwise : std::atof(found->second.c_str());
  }
  std::string text(const char* name) const {
    auto found = given.find(name);
    return found == given.end() ? "" : found->second;
  }
  tcp::Options options() const {
    tcp::Options options;
    options.interface = text("interface");
    options.secret = text("secret");
    options.sockets = static_cast<int>(number("sockets", options.sockets));
    options.checksum = number("checksum", 0) != 0;
    options.timing.heartbeat = number("heartbeat", options.timing.heartbeat);
    options.timing.silence = number("silence", options.timing.silence);
    options.network = std::filesystem::read_symlink("/proc/self/ns/net").string();
    return options;
  }
  Duration limit() const { return seconds(number("timeout", 30)); }
};

std::string to_hex(const std::string& bytes) {
  std::string text;
  for (unsigned char byte : bytes) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", byte);
    text += two;
  }
  return text;
}

std::string from_hex(const std::string& text) {
  std::string bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2)
    bytes += static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16));
  return bytes;
}

std::vector<std::string> swap_addresses(const Settings& settings, const std::string& own) {
  std::cout << "address " << to_hex(own) << std::endl;
  std::vector<std::string> addresses(settings.size);
  for (auto& address : addresses) {
    std::string line;
    if (!std::getline(std::cin, line)) throw Error(ErrorKind::InvalidUsage, "no address on standard input");
    address = line == "-" ? "" : from_hex(line);
  }
  return addresses;
}

void expect_equal(const Bytes& got, const Bytes& wanted) {
  if (got != wanted) throw Error(ErrorKind::Mismatch, "the bytes that came are not those that were sent");
}

double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

void exchange(const Settings& settings, Running& endpoint, Clock::time_point& last_round) {
  auto bytes = static_cast<size_t>(settings.number("bytes", 1 << 20));
  int transfers = static_cast<int>(settings.number("transfers", 4));
  int rounds = static_cast<int>(settings.number("rounds", 10));
  auto seed = [&](int from, int to, int i) { return (uint64_t{1} * from * settings.size + to) * 1000 + i; };
  struct Swap {
    int peer, number;
    Bytes out, in, wanted;
  };
  std::vector<Swap> swaps;
  for (int peer = 0; peer < settings.size; ++peer) {
    for (int i = 0; i < transfers && peer != settings.rank; ++i)
      swaps.push_back({peer, i, pattern(bytes, seed(settings.rank, peer, i)), Bytes(bytes),
                       pattern(bytes, seed(peer, settings.rank, i))});
  }
  for (int round = 0; round < rounds; ++round) {
    std::vector<Transfer> all;
    for (auto& [peer, i, out, in, wanted] : swaps) {
      std::memset(in.data(), 0, bytes);
      all.push_back(endpoint->receive(peer, i, in.data(), bytes));
      all.push_back(endpoint->send(peer, i, out.data(), bytes));
    }
    for (auto& transfer : all) endpoint.wait_done(transfer);
    for (const Swap& swap : swaps) expect_equal(swap.in, swap.wanted);
    last_round = Clock::now();
    std::cout << "round " << round << std::endl;
    std::this_thread::sleep_for(seconds(settings.number("pause", 0)));
  }
}

void pump(const Settings& settings, Running& endpoint) {
  auto bytes = static_cast<size_t>(settings.number("bytes", 1 << 20));
  size_t window = static_cast<size_t>(settings.number("transfers", 8));
  size_t rounds = static_cast<size_t>(settings.number("rounds", 64));
  int peer = 1 - settings.rank;
  const Bytes out = pattern(bytes, settings.rank), wanted = pattern(bytes, peer);
  std::vector<Bytes> in(window, Bytes(bytes));
  std::vector<Transfer> sends(window), receives(window);
  endpoint->tell(peer, "go");
  endpoint.wait_message();
  auto begin = Clock::now();
  for (size_t i = 0; i < rounds + window; ++i) {
    size_t slot = i % window;
    if (i >= window) {
      endpoint.wait_done(receives[slot]);
      endpoint.wait_done(sends[slot]);
    }
    if (i < rounds) {
      receives[slot] = endpoint->receive(peer, i, in[slot].data(), bytes);
      sends[slot] = endpoint->send(peer, i, out.data(), bytes);
    }
  }
  double took = since(begin);
  for (auto& each : in) expect_equal(each, wanted);
  std::cout << "pumped " << rounds * bytes << " " << took << std::endl;
}

// Each socket carries its share, both ways at once, 256 KiB a call; one thread, as the transport has it.
void raw(const Settings& settings, const tcp::Sockets& sockets) {
  constexpr size_t kCall = 256 << 10;
  auto bytes = static_cast<size_t>(settings.number("bytes", 1 << 20));
  size_t total = static_cast<size_t>(settings.number("rounds", 64)) * bytes, lanes = sockets.size() - 1;
  const Bytes out = pattern(kCall, settings.rank), wanted = pattern(kCall, 1 - settings.rank);
  Bytes in(lanes * kCall);
  struct Lane {
    size_t to_send, to_receive;
  };
  const size_t share = total / lanes / kCall * kCall;
  std::vector<Lane> work(lanes, {share, share});
  char go = 1;
  (void)!send(sockets[0].get(), &go, 1, 0);
  pollfd wait{sockets[0].get(), POLLIN, 0};
  poll(&wait, 1, -1);
  auto begin = Clock::now();
  for (bool left = true; left;) {
    std::vector<pollfd> polls;
    left = false;
    for (size_t lane = 0; lane < lanes; ++lane) {
      int events = (work[lane].to_send ? POLLOUT : 0) | (work[lane].to_receive ? POLLIN : 0);
      polls.push_back({sockets[lane + 1].get(), static_cast<short>(events), 0});
      left |= events != 0;
    }
    poll(polls.data(), polls.size(), left ? 1000 : 0);
    for (size_t lane = 0; lane < lanes; ++lane) {
      Lane& rest = work[lane];
      if ((polls[lane].revents & POLLOUT) && rest.to_send) {
        size_t at = (kCall - rest.to_send % kCall) % kCall;
        ssize_t sent = send(polls[lane].fd, out.data() + at, std::min(kCall - at, rest.to_send), MSG_NOSIGNAL);
        if (sent > 0) rest.to_send -= sent;
      }
      if ((polls[lane].revents & POLLIN) && rest.to_receive) {
        size_t at = (kCall - rest.to_receive % kCall) % kCall;
        ssize_t got = recv(polls[lane].fd, in.data() + lane * kCall + at, std::min(kCall - at, rest.to_receive), 0);
        if (got == 0) throw Error(ErrorKind::PeerLost, "the other side closed");
        if (got > 0) rest.to_receive -= got;
      }
    }
  }
  double took = since(begin);
  for (size_t lane = 0; lane < lanes; ++lane)
    expect_equal(Bytes(in.begin() + lane * kCall, in.begin() + (lane + 1) * kCall), wanted);
  std::cout << "pumped " << lanes * share << " " << took << std::endl;
  send(sockets[0].get(), &go, 1, MSG_NOSIGNAL);  // nobody closes before the other is done
  char bytes_left[2];
  wait.revents = 0;
  recv(sockets[0].get(), bytes_left, 1, 0);
  poll(&wait, 1, 5000);
}

void raw(const Settings& settings) {
  tcp::Options options = settings.options();
  tcp::Address own{.ip = tcp::choose_ip(options.interface, tcp::local_interfaces()),
                   .network = tcp::sha256(options.network),
                   .key = tcp::random_bytes(32)};
  ParentFd listener = tcp::listen_on(own.ip);
  own.port = tcp::port_of(listener);
  auto addresses = swap_addresses(settings, encode(own));
  int peer = 1 - settings.rank;
  tcp::Rendezvous rendezvous(options, settings.rank, own, {{peer, tcp::decode_address(peer, addresses[peer])}},
                             listener.get());
  auto sockets = rendezvous.run(Deadline::after(settings.limit()), {});
  std::cout << "connected" << std::endl;
  for (auto& socket : sockets.at(peer)) tcp::send_at_once(socket);
  raw(settings, sockets.at(peer));
}

int main_of(const Settings& settings) {
  auto last_round = Clock::now();
  try {
    if (settings.mode == "raw") {
      raw(settings);
    } else {
      tcp::Listener listener(settings.options());
      auto addresses = swap_addresses(settings, listener.address());
      last_round = Clock::now();
      Running endpoint(tcp::connect(std::move(listener), settings.rank, addresses, Deadline::after(settings.limit())),
                       settings.limit());
      std::cout << "connected" << std::endl;
      last_round = Clock::now();
      if (settings.mode == "pump")
        pump(settings, endpoint);
      else
        exchange(settings, endpoint, last_round);
    }
  } catch (const Error& error) {
    std::cout << "error " << name(error.kind()) << " " << since(last_round) << " " << error.what() << std::endl;
    return 1;
  }
  std::cout << "done" << std::endl;
  return 0;
}

}  // namespace

}  // namespace syncengine

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: tcp_rank <rank> <size> exchange|pump|raw [name=value ...]\n");
    return 2;
  }
  syncengine::Settings settings{std::atoi(argv[1]), std::atoi(argv[2]), argv[3], {}};
  for (int i = 4; i < argc; ++i) {
    std::string setting = argv[i];
    size_t equals = setting.find('=');
    settings.given[setting.substr(0, equals)] = equals == std::string::npos ? "" : setting.substr(equals + 1);
  }
  return syncengine::main_of(settings);
}
