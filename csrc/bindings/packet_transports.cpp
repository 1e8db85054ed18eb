#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <condition_variable>
#include <mutex>
#include <set>

#include "bindings/bindings.h"
#include "c10d/torch_transports.h"
#include "streams/without_gil.h"
#include "transport/packets/endpoint.h"

namespace py = pybind11;

namespace syncengine {

namespace {

// Closes a transport in Python by `close`, whose errors go to sys.unraisablehook only; then drops `owner`.
template <class Close>
void close_and_drop(py::object& owner, const Close& close) {
  py::gil_scoped_acquire gil;
  try {
    close();
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("syncengine: closing what connects hosts");
  }
  owner = {};
}

// A transport written in Python, as _C.pyi describes it. Each call takes the GIL once; an exception fails everything
// that is under way.
class PythonPacketTransport final : public packets::PacketTransport {
 public:
  explicit PythonPacketTransport(py::object transport) : transport_(std::move(transport)) {}
  ~PythonPacketTransport() override {
    if (!transport_) return;
    py::gil_scoped_acquire gil;
    transport_ = {};
  }

  bool start(std::function<void()>) override { return false; }

  std::vector<End> step(const std::vector<Packet>& posts) override {
    for (const Packet& packet : posts) pending_.insert(packet.id);
    if (pending_.empty()) return {};
    std::vector<End> ends;
    try {
      py::gil_scoped_acquire gil;
      try {
        py::list list;
        for (const Packet& packet : posts) {
          auto memory = py::memoryview::from_memory(packet.data, static_cast<py::ssize_t>(packet.bytes));
          list.append(py::make_tuple(packet.id, packet.peer, packet.outgoing, memory));
        }
        for (auto& [id, error] : transport_.attr("step")(list).cast<std::vector<std::pair<uint64_t, std::string>>>())
          if (pending_.erase(id)) ends.push_back({id, std::move(error)});
      } catch (const std::exception& error) {  // the exception is destroyed while the GIL is held
        fail_all(error.what(), ends);
      }
    } catch (const std::exception& error) {
      fail_all(error.what(), ends);
    }
    return ends;
  }

  void close(bool in_order) override {
    close_and_drop(transport_, [&] { transport_.attr("close")(in_order); });
  }

 private:
  void fail_all(const std::string& text, std::vector<End>& ends) {
    for (uint64_t id : pending_) ends.push_back({id, text});
    pending_.clear();
  }

  py::object transport_;
  std::set<uint64_t> pending_;
};

// Endpoints that run, and so may take the GIL: all must have ended before the interpreter does.
struct EndpointRegistry {
  std::mutex mutex;
  std::condition_variable changed;
  std::set<packets::Endpoint*> running;
};

EndpointRegistry& endpoint_registry() {
  static auto* instance = new EndpointRegistry;  // never destroyed: endpoints may outlive static destruction
  return *instance;
}

class RegisteredEndpoint final : public packets::Endpoint {
 public:
  RegisteredEndpoint(std::unique_ptr<packets::PacketTransport> transport, const packets::Options& options, int rank,
                     const std::vector<int>& peers)
      : Endpoint(std::move(transport), options, rank, peers) {
    std::lock_guard lock(endpoint_registry().mutex);
    endpoint_registry().running.insert(this);
  }
  ~RegisteredEndpoint() override { remove(); }

  // The thread that drops the last communicator calls this, and then joins run()'s thread. If it holds the GIL, which
  // run() may need to end, it releases the GIL and waits here.
  void stop() override {
    Endpoint::stop();
    const WithoutGil without_gil;
    if (!without_gil.released) return;
    std::unique_lock lock(endpoint_registry().mutex);
    endpoint_registry().changed.wait(lock, [this] { return !endpoint_registry().running.contains(this); });
  }

  void run(const std::function<void()>& progressed) override {
    Endpoint::run(progressed);
    remove();
  }

 private:
  void remove() {
    std::lock_guard lock(endpoint_registry().mutex);
    endpoint_registry().running.erase(this);
    endpoint_registry().changed.notify_all();
  }
};

void end_packet_transports() {
  std::unique_lock lock(endpoint_registry().mutex);
  for (auto* endpoint : endpoint_registry().running) endpoint->Endpoint::stop();
  endpoint_registry().changed.wait(lock, [] { return endpoint_registry().running.empty(); });
}

}  // namespace

std::unique_ptr<Interhost> connect_by(PacketTransportHandle& handle, int rank, const std::vector<int>& peers,
                                      RankNames names) {
  if (!handle.transport) throw Error(ErrorKind::InvalidUsage, "this transport has been used already");
  handle.options.names = std::move(names);
  return std::make_unique<RegisteredEndpoint>(std::move(handle.transport), handle.options, rank, peers);
}

void bind_packet_transports(py::module_& module) {
  py::module_::import("torch.distributed");  // registers the class of groups
  py::class_<PacketTransportHandle>(module, "PacketTransport");
  module.def(
      "python_packet_transport",
      [](py::object transport, std::string by, bool checksum) {
        return PacketTransportHandle{std::make_unique<PythonPacketTransport>(std::move(transport)),
                                     {.by = std::move(by), .checksum = checksum}};
      },
      py::arg("transport"), py::arg("by"), py::arg("checksum"));
  module.def(
      "torch_packet_transport",
      [](c10::intrusive_ptr<::c10d::ProcessGroup> group, std::vector<int> ranks, int tag, py::function closed,
         std::string by, bool checksum, double silence) {
        auto call = std::make_shared<py::function>(std::move(closed));
        auto on_closed = [call] { close_and_drop(*call, *call); };
        auto transport = std::make_unique<TorchPacketTransport>(std::move(group), std::move(ranks), tag, on_closed);
        return PacketTransportHandle{std::move(transport),
                                     {.by = std::move(by), .checksum = checksum, .timing = {.silence = silence}}};
      },
      py::arg("group"), py::arg("ranks"), py::arg("tag"), py::arg("closed"), py::arg("by"), py::arg("checksum"),
      py::arg("silence"));
  module.def("announce_end", [] { matching::process_ends = true; });
  module.def("end_packet_transports", &end_packet_transports, py::call_guard<py::gil_scoped_release>());
}

}  // namespace syncengine
