#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/movers.h"
#include "bindings/python_threads.h"
#include "engine/communicator/solo.h"
#include "engine/job/local_bootstrap.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/tcp.h"

namespace py = pybind11;

namespace syncengine {

namespace {

template <class Value>
Value choose(const py::dict& options, const char* key, std::initializer_list<std::pair<const char*, Value>> choices) {
  auto text = options[key].cast<std::string>();
  std::string allowed;
  for (auto [word, value] : choices) {
    if (text == word) return value;
    allowed += std::string(allowed.empty() ? "'" : ", '") + word + "'";
  }
  throw Error(ErrorKind::InvalidUsage, std::string(key) + "='" + text + "' is not one of " + allowed);
}

Options parse(const py::dict& options) {
  Options result;
  result.numerics = choose<Numerics>(
      options, "numerics", {{"rank_order", Numerics::RankOrder}, {"ring", Numerics::Ring}, {"fast", Numerics::Fast}});
  result.algorithm = choose<Algorithm>(options, "algorithm",
                                       {{"auto", Algorithm::Auto},
                                        {"direct", Algorithm::Direct},
                                        {"staged", Algorithm::Staged},
                                        {"one_shot", Algorithm::OneShot},
                                        {"ring", Algorithm::Ring}});
  result.host_algorithm = choose<HostAlgorithm>(
      options, "host_algorithm",
      {{"auto", HostAlgorithm::Auto}, {"exchange", HostAlgorithm::Exchange}, {"chain", HostAlgorithm::Chain}});
  result.gradient_memory = choose<GradientMemory>(options, "gradient_memory",
                                                  {{"arena", GradientMemory::Arena}, {"torch", GradientMemory::Torch}});
  result.timeout = seconds(options["timeout"].cast<double>());
  result.log_after = seconds(options["log_after"].cast<double>());
  result.arena_bytes = options["arena_bytes"].cast<size_t>();
  return result;
}

tcp::Options parse_network(const py::dict& options) {
  tcp::Options result;
  result.interface = options["interface"].cast<std::string>();
  result.sockets = options["sockets"].cast<int>();
  result.checksum = options["checksum"].cast<bool>();
  result.silence = options["silence"].cast<double>();
  result.peers = options["peers"].cast<int>();
  result.secret = tcp::load_secret(options["secret"].cast<std::string>(), options["secret_file"].cast<std::string>());
  return result;
}

// A job, and where it listens for ranks of other hosts once it is known that there are any.
struct Bootstrap {
  LocalBootstrap job;
  int rank;
  std::unique_ptr<tcp::Listener> listener = {};

  std::shared_ptr<Communicator> connect(const std::vector<std::string>& addresses, double timeout,
                                        const std::vector<int>& global_ranks,
                                        const std::vector<std::string>& network_addresses, MoverHandle* mover) {
    auto deadline = Deadline::after(seconds(timeout));
    auto make_interhost = [&] {
      if (mover) {
        std::vector<int> peers;
        auto hosts = job.hosts(addresses);
        for (int peer = 0; peer < static_cast<int>(hosts.size()); ++peer)
          if (hosts[peer] != hosts[rank]) peers.push_back(peer);
        return connect_by(*mover, rank, peers);
      }
      if (!listener || network_addresses.size() != addresses.size())
        throw Error(ErrorKind::InvalidUsage, "connect() needs listen() and its answers where there are several hosts");
      auto peers = network_addresses;
      auto hosts = job.hosts(addresses);
      for (size_t peer = 0; peer < peers.size(); ++peer)
        if (hosts[peer] == hosts[rank]) peers[peer].clear();
      return tcp::connect(std::move(*std::exchange(listener, {})), rank, peers, deadline, check_signals());
    };
    return job.connect(addresses, deadline, check_signals(), global_ranks, make_interhost);
  }
};

}  // namespace

void bind_local_bootstrap(py::module_& module) {
  py::class_<Bootstrap>(module, "LocalBootstrap", "How the ranks of a job find each other.")
      .def(py::init([](int rank, int size, const py::dict& options) {
             return std::unique_ptr<Bootstrap>(
                 new Bootstrap{LocalBootstrap(rank, size, parse(options), count_python_threads,
                                              options["host_id"].cast<std::string>()),
                               rank});
           }),
           py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(
          "address", [](const Bootstrap& self) { return py::bytes(self.job.address()); },
          "Opaque bytes for every other rank.")
      .def(
          "hosts",
          [](const Bootstrap& self, const std::vector<std::string>& addresses) { return self.job.hosts(addresses); },
          py::arg("addresses"), "The host of each rank, numbered from 0. `addresses` by rank.")
      .def(
          "on_one_network",
          [](const Bootstrap& self, const std::vector<std::string>& addresses) {
            return self.job.on_one_network(addresses);
          },
          py::arg("addresses"),
          "Whether the hosts are parts of one machine, whose loopback interface reaches them all.")
      .def(
          "listen",
          [](Bootstrap& self, const py::dict& options) {
            self.listener = std::make_unique<tcp::Listener>(parse_network(options));
            return py::bytes(self.listener->address());
          },
          py::arg("options"), "Listens for ranks of other hosts. Opaque bytes for every other rank.")
      .def(
          "connect",
          [](Bootstrap& self, const std::vector<std::string>& addresses, double timeout,
             const std::optional<std::vector<int>>& global_ranks,
             const std::optional<std::vector<std::string>>& network_addresses, MoverHandle* mover) {
            py::gil_scoped_release nogil;
            return self.connect(addresses, timeout, global_ranks.value_or(std::vector<int>{}),
                                network_addresses.value_or(std::vector<std::string>{}), mover);
          },
          py::arg("addresses"), py::arg("timeout"), py::arg("global_ranks") = py::none(),
          py::arg("network_addresses") = py::none(), py::arg("mover") = py::none(),
          "The communicator of all ranks. `addresses` by rank; `timeout` in seconds. Where there are several hosts, "
          "`network_addresses` from listen() or a mover.");
  module.def(
      "solo", [](const py::dict& options) { return make_solo_communicator(parse(options)); }, py::arg("options"),
      "The communicator of a job of one rank: no thread, no shared memory.");
}

}  // namespace syncengine
