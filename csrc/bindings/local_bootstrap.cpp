#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bootstrap/host.h"
#include "engine/communicator/communicator.h"
#include "engine/job/local_bootstrap.h"
#include "engine/progress/engine.h"
#include "reducer/torch/python_error.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/tcp.h"

namespace py = pybind11;

namespace syncengine {

namespace {

// The modules of threads that many programs have, and that never call the engine: is_helper() looks at the module of a
// thread's function or class. A DataLoader has one thread for each worker's queue, and one that pins memory; a process
// that has sent tensors to another has one; loggers and tqdm have theirs.
constexpr const char* kHelpers[] = {"multiprocessing.queues",
                                    "multiprocessing.resource_sharer",
                                    "torch.utils.data._utils.pin_memory",
                                    "logging.handlers",
                                    "tensorboard.summary.writer.event_file_writer",
                                    "tqdm._monitor"};

bool is_helper(py::handle thread) {
  for (py::handle owner : {py::object(py::getattr(thread, "_target", py::none())), py::object(py::type::of(thread))}) {
    auto module = py::str(py::getattr(owner, "__module__", py::none())).cast<std::string>();
    if (std::find(std::begin(kHelpers), std::end(kHelpers), module) != std::end(kHelpers)) return true;
  }
  return false;
}

// Whether the thread belongs to a ThreadPoolExecutor (torch.compile leaves one) and has no task, which only another
// thread can give it.
bool is_idle_worker(py::handle thread, const py::dict& frames) {
  py::object target = py::getattr(thread, "_target", py::none()), ident = thread.attr("ident");
  return target.is(py::module_::import("concurrent.futures.thread").attr("_worker")) && frames.contains(ident) &&
         frames[ident].attr("f_code").is(target.attr("__code__"));
}

int count_helpers() {
  int count = 0;
  const py::dict frames = py::module_::import("sys").attr("_current_frames")();
  // threading.enumerate() would take a lock that this very thread may hold.
  for (py::handle thread : py::list(py::module_::import("threading").attr("_active").attr("values")()))
    count += is_helper(thread) || is_idle_worker(thread, frames);
  return count;
}

// Returns how many threads might call the engine, for the deadlock detector: all that Python knows, without helpers and
// idle workers. kUnknownCallers on a thread that Python does not know.
int count_python_threads() {
  if (PyGILState_GetThisThreadState() == nullptr) return kUnknownCallers;
  py::gil_scoped_acquire gil;
  int count = 0;
  for (auto* interpreter = PyInterpreterState_Head(); interpreter; interpreter = PyInterpreterState_Next(interpreter)) {
    for (auto* thread = PyInterpreterState_ThreadHead(interpreter); thread; thread = PyThreadState_Next(thread))
      ++count;
  }
  if (count == 1) return count;
  try {
    return count - count_helpers();
  } catch (const py::error_already_set&) {
    return kUnknownCallers;
  }
}

struct JobOptions : Options {
  std::string host_id;
};

struct NetworkOptions : tcp::Options {
  std::string secret_file;
};

// Defines a field of JobOptions whose values are strings in Python.
template <class Value>
void def_words(py::class_<JobOptions>& options, const char* name, Value Options::* field,
               const std::vector<std::pair<std::string, Value>>& words) {
  auto get = [=](const JobOptions& self) {
    return std::find_if(words.begin(), words.end(), [&](auto& word) { return word.second == self.*field; })->first;
  };
  auto set = [=](JobOptions& self, const std::string& text) {
    std::string allowed;
    for (const auto& [word, value] : words) {
      if (text == word) self.*field = value;
      allowed += (allowed.empty() ? "'" : ", '") + word + "'";
    }
    if (get(self) != text) {
      throw Error(ErrorKind::InvalidUsage, std::string(name) + "='" + text + "' is not one of " + allowed);
    }
  };
  options.def_property(name, get, set);
}

void def_seconds(py::class_<JobOptions>& options, const char* name, Duration Options::* field) {
  options.def_property(
      name, [=](const JobOptions& self) { return std::chrono::duration<double>(self.*field).count(); },
      [=](JobOptions& self, double value) { self.*field = seconds(value); });
}

void bind_options(py::module_& module) {
  py::class_<JobOptions> job(module, "JobOptions");
  job.def(py::init<>());
  def_words(job, "numerics", &Options::numerics,
            {{"rank_order", Numerics::RankOrder}, {"ring", Numerics::Ring}, {"fast", Numerics::Fast}});
  def_words(job, "algorithm", &Options::algorithm,
            {{"auto", Algorithm::Auto},
             {"direct", Algorithm::Direct},
             {"staged", Algorithm::Staged},
             {"one_shot", Algorithm::OneShot}});
  def_words(job, "host_algorithm", &Options::host_algorithm,
            {{"auto", HostAlgorithm::Auto}, {"exchange", HostAlgorithm::Exchange}, {"chain", HostAlgorithm::Chain}});
  def_words(job, "gradient_memory", &Options::gradient_memory,
            {{"arena", GradientMemory::Arena}, {"torch", GradientMemory::Torch}});
  def_seconds(job, "timeout", &Options::timeout);
  def_seconds(job, "log_after", &Options::log_after);
  job.def_readwrite("timeout_call", &JobOptions::timeout_call);
  job.def_readwrite("arena_bytes", &JobOptions::arena_bytes).def_readwrite("host_id", &JobOptions::host_id);
  py::class_<NetworkOptions>(module, "NetworkOptions")
      .def(py::init<>())
      .def_readwrite("interface", &NetworkOptions::interface)
      .def_readwrite("sockets", &NetworkOptions::sockets)
      .def_readwrite("checksum", &NetworkOptions::checksum)
      .def_readwrite("log_after", &NetworkOptions::log_after)
      .def_property(
          "silence", [](const NetworkOptions& self) { return self.timing.silence; },
          [](NetworkOptions& self, double value) { self.timing.silence = value; })
      .def_readwrite("secret", &NetworkOptions::secret)
      .def_readwrite("secret_file", &NetworkOptions::secret_file);
}

// A LocalBootstrap, and the listener for ranks of other hosts once it is known that there are any.
struct Bootstrap : LocalBootstrap {
  int rank;
  RankNames names;
  std::unique_ptr<tcp::Listener> listener = {};

  std::shared_ptr<Communicator> connect(const std::vector<std::string>& addresses, double timeout,
                                        const std::vector<std::string>& network_addresses,
                                        PacketTransportHandle* transport, const py::object& lost) {
    auto deadline = Deadline::after(seconds(timeout));
    auto interrupted = [&lost] {
      raise_pending_signal();
      if (lost.is_none()) return;
      py::gil_scoped_acquire gil;
      if (auto why = lost().cast<std::string>(); !why.empty()) throw Error(ErrorKind::PeerLost, why);
    };
    auto make_interhost = [&] {
      const auto host_of = hosts(addresses);
      if (transport) {
        std::vector<int> peers;
        for (int peer = 0; peer < static_cast<int>(host_of.size()); ++peer)
          if (host_of[peer] != host_of[rank]) peers.push_back(peer);
        return connect_by(*transport, rank, peers, names);
      }
      if (!listener || network_addresses.size() != addresses.size())
        throw Error(ErrorKind::InvalidUsage, "connect() needs listen() and its answers where there are several hosts");
      auto peers = network_addresses;
      for (size_t peer = 0; peer < peers.size(); ++peer)
        if (host_of[peer] == host_of[rank]) peers[peer].clear();
      return tcp::connect(std::move(*std::exchange(listener, {})), rank, peers, deadline, interrupted);
    };
    return LocalBootstrap::connect(addresses, deadline, interrupted, make_interhost);
  }
};

}  // namespace

void bind_local_bootstrap(py::module_& module) {
  bind_options(module);
  py::class_<Bootstrap>(module, "LocalBootstrap")
      .def(py::init(
               [](int rank, int size, const JobOptions& options, const std::optional<std::vector<int>>& global_ranks) {
                 const auto ranks = global_ranks.value_or(std::vector<int>{});
                 return std::unique_ptr<Bootstrap>(new Bootstrap{
                     {rank, size, options, count_python_threads, options.host_id, ranks}, rank, RankNames{ranks}});
               }),
           py::arg("rank"), py::arg("size"), py::arg("options"), py::arg("global_ranks") = py::none())
      .def("address", [](const Bootstrap& self) { return py::bytes(self.address()); })
      .def("hosts", &Bootstrap::hosts, py::arg("addresses"))
      .def("on_one_network", &Bootstrap::on_one_network, py::arg("addresses"))
      .def("unseen", &Bootstrap::unseen, py::arg("addresses"))
      .def(
          "listen",
          [](Bootstrap& self, NetworkOptions options) {
            options.secret = tcp::load_secret(options.secret, options.secret_file);
            options.names = self.names;
            options.network = network_of(host_key(""));
            self.listener = std::make_unique<tcp::Listener>(options);
            return py::bytes(self.listener->address());
          },
          py::arg("options"))
      .def(
          "connect",
          [](Bootstrap& self, const std::vector<std::string>& addresses, double timeout,
             const std::optional<std::vector<std::string>>& network_addresses, PacketTransportHandle* transport,
             const py::object& lost) {
            return self.connect(addresses, timeout, network_addresses.value_or(std::vector<std::string>{}), transport,
                                lost);
          },
          py::arg("addresses"), py::arg("timeout"), py::arg("network_addresses") = py::none(),
          py::arg("transport") = py::none(), py::arg("lost") = py::none(), py::call_guard<py::gil_scoped_release>());
  module.def(
      "solo", [](const JobOptions& options, int global_rank) { return make_solo_communicator(options, global_rank); },
      py::arg("options"), py::arg("global_rank") = 0);
}

}  // namespace syncengine
