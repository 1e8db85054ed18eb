#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "c10d/backend.h"
#include "c10d/call.h"
#include "c10d/in_flight.h"
#include "c10d/torch_dtype.h"
#include "c10d/torch_work.h"
#include "collectives/operation.h"
#include "cuda/device_group.h"
#include "engine/communicator/communicator.h"
#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"
#include "streams/queue.h"

namespace py = pybind11;

namespace syncengine {

namespace {

DType dtype_of(at::ScalarType type, const char* what) {
  if (auto dtype = same_dtype(type)) return *dtype;
  refuse(what, "dtype ", c10::toString(type),
         " is not supported; use float16, bfloat16, float32, float64, int8 to int64, uint8 or bool");
}

ReduceOp op_of(const std::string& text) {
  for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
    if (text == name(op)) return op;
  }
  throw Error(ErrorKind::InvalidUsage, "op '" + text + "' is not one of 'sum', 'avg', 'product', 'min', 'max'");
}

// The error that `call` throws, as a Python exception, or None. Called with the GIL.
template <class Function>
py::object exception_of(const Function& call) {
  try {
    call();
  } catch (const Error& error) {
    return to_python(error);
  }
  return py::none();
}

void require_seconds(const char* what, double value) {
  if (value > 0) return;  // not NaN
  throw Error(ErrorKind::InvalidUsage, std::string(what) + ": give seconds, more than 0, not " + std::to_string(value));
}

// The Python object for an asynchronous collective, on CPU or CUDA tensors.
struct PyWork {
  void wait(std::optional<double> timeout) const {
    using std::chrono::milliseconds;  // 0 ms means no limit, hence at least 1
    require_seconds("wait(timeout=...)", timeout.value_or(1));
    work->wait(timeout ? std::max(milliseconds(1), std::chrono::ceil<milliseconds>(seconds(*timeout))) : kNoTimeout);
  }
  py::object exception() const {
    return exception_of([this] {
      if (const auto error = work->exception()) std::rethrow_exception(error);
    });
  }

  c10::intrusive_ptr<::c10d::Work> work;
};

// A hash of the shape, and of the order of elements if they are dense, but not row by row.
uint64_t layout_hash(const at::Tensor& tensor) {
  uint64_t hash = 0xcbf29ce484222325;
  for (int64_t size : tensor.sizes()) hash = mix(hash, size);
  return tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense() ? hash : mix_strides(hash, tensor);
}

// Puts the tensors of a call into its operation. In place, elements may lie in any order that is the same on all ranks.
void add_tensors(Call& call, Operation& operation, const at::Tensor& input, const at::Tensor& output, int rank) {
  if (input.is_same(output)) {
    call.update(output, operation.output);
    operation.input = operation.output;
    operation.layout_hash = layout_hash(output);
    return;
  }
  at::NoGradGuard no_grad;
  call.require_dense(input);
  const at::Tensor to = call.write(output, operation.output);
  // The engine takes an input that does not overlap the output, and an all-gather's input that lies at this rank's
  // place in the output. Any other input is copied.
  const bool apart = at::get_overlap_status(input, to) == at::MemOverlapStatus::No ||
                     (operation.collective == Collective::AllGather && is_in_place(to, rank * input.numel(), input));
  call.read(apart ? input : call.settled(input).clone(at::MemoryFormat::Contiguous), operation.input);
}

std::optional<PyWork> start(const std::shared_ptr<Communicator>& communicator, Collective collective,
                            const at::Tensor& input, const at::Tensor& output, ReduceOp op, int root, bool async_op,
                            const std::string& layout = "") {
  Call call(name(collective), {.any_order = input.is_same(output)});
  Operation operation{.collective = collective, .op = op, .numerics = communicator->numerics(), .root = root};
  add_tensors(call, operation, input, output, communicator->rank());
  operation.dtype = dtype_of(output.scalar_type(), call.name());
  operation.postscale = op == ReduceOp::Avg ? 1.0 / communicator->size() : 1.0;
  if (!layout.empty()) {
    for (unsigned char letter : layout) operation.layout_hash = mix(operation.layout_hash, letter);
    operation.describe = [layout] { return layout; };
  }
  call.add(std::move(operation));
  py::gil_scoped_release nogil;
  if (!call.device().is_cpu()) {
    const c10::Stream stream = queue_on_device(communicator, call, async_op);
    if (async_op) {
      call.results() = {input, output};  // the work keeps the tensors
      return PyWork{finish_on_device({communicator}, std::move(call), stream)};
    }
    call.deliver();
  } else if (async_op) {
    auto works = submit_call(*communicator, call);
    return PyWork{TorchWork::in_flight({communicator}, std::move(call), std::move(works))};
  } else {
    run_call(*communicator, call);
  }
  return std::nullopt;
}

ErrorKind kind_of(const std::string& error) {
  for (ErrorKind kind :
       {ErrorKind::PeerLost, ErrorKind::Timeout, ErrorKind::Mismatch, ErrorKind::Aborted, ErrorKind::InvalidUsage})
    if (error == name(kind)) return kind;
  refuse("abort", "can't raise '", error, "': give 'PeerLost', 'Timeout', 'Mismatch', 'Aborted' or 'InvalidUsage'");
}

// Makes a tensor on a CUDA device, in memory that all peers reach. All ranks call it, with the GIL.
at::Tensor empty_on_device(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& sizes,
                           size_t bytes, at::ScalarType type, c10::Device device) {
  if (!device.is_cuda()) refuse("empty", "device '", device, "' is neither a CPU nor a CUDA device");
  if (!device.has_index()) {
    cuda::require_device(0);
    device = c10::impl::VirtualGuardImpl(kDeviceType).getDevice();
  }
  cuda::require_device(device.index());
  if (communicator->size() == 1) return at::empty(sizes, at::TensorOptions().dtype(type).device(device));
  py::gil_scoped_release nogil;
  return queue_of(communicator, device, raise_pending_signal)->empty(sizes, bytes, type, raise_pending_signal);
}

at::Tensor empty(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& sizes,
                 at::ScalarType type, std::optional<c10::Device> device) {
  dtype_of(type, "empty");
  int64_t bytes = static_cast<int64_t>(c10::elementSize(type));
  bool too_many = false;
  for (int64_t extent : sizes) {
    if (extent < 0) refuse("empty", "negative size ", extent);
    too_many |= __builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (too_many && std::find(sizes.begin(), sizes.end(), 0) == sizes.end())
    refuse("empty", "no address space has room for so many elements");
  if (device && !device->is_cpu()) return empty_on_device(communicator, sizes, bytes, type, *device);
  auto memory = communicator->allocate(bytes);
  return at::from_blob(
      memory.get(), sizes, [memory](void*) mutable { memory.reset(); }, at::TensorOptions().dtype(type));
}

}  // namespace

void bind_communicator(py::module_& module) {
  // Objects that may hold the last reference to a communicator are destroyed without the GIL: that ends the engine's
  // thread, which may be waiting for the GIL itself.
  const py::release_gil_before_calling_cpp_dtor without_gil;
  py::class_<PyWork>(module, "Work", "The future of one asynchronous collective.", without_gil)
      .def("wait", &PyWork::wait, py::arg("timeout") = py::none(), py::call_guard<py::gil_scoped_release>(),
           "Blocks until the collective has ended, and raises its error. If `timeout` seconds pass before, the "
           "communicator is aborted with Timeout, since the tensor is in use.")
      .def(
          "is_completed", [](const PyWork& self) { return self.work->isCompleted(); },
          py::call_guard<py::gil_scoped_release>(), "Whether the collective has ended, well or not.")
      .def("exception", &PyWork::exception, "The error with which the collective has ended, or None.");

  using Shared = std::shared_ptr<Communicator>;
  py::class_<Communicator, Shared>(module, "Communicator", "A group of ranks that run collectives together.",
                                   without_gil)
      .def_property_readonly("rank", &Communicator::rank, "This process's rank in the group.")
      .def_property_readonly("size", &Communicator::size, "Number of ranks in the group.")
      .def_property_readonly("global_ranks", &Communicator::global_ranks, "The rank of each member in the whole job.")
      .def_property_readonly(
          "numerics", [](const Communicator& c) { return name(c.numerics()); }, "'rank_order', 'ring' or 'fast'.")
      .def_property_readonly(
          "timeout", [](const Communicator& c) { return std::chrono::duration<double>(c.timeout()).count(); },
          "Seconds after which a collective gives up.")
      .def_property_readonly("links", &Communicator::describe_links,
                             "The sizes from which on collectives between hosts go by chain or relay, as a text. "
                             "Empty on one host. An example: \"all_reduce by chain from 256 KiB (16-bit never), "
                             "broadcast by relay never\".")
      .def(
          "all_reduce",
          [](const Shared& self, const at::Tensor& tensor, const std::string& op, bool async_op) {
            return start(self, Collective::AllReduce, tensor, tensor, op_of(op), kNoRoot, async_op);
          },
          py::arg("tensor"), py::arg("op") = "sum", py::arg("async_op") = false,
          "Reduces `tensor` in place over all ranks: same shape, strides and dtype everywhere.")
      .def(
          "broadcast",
          [](const Shared& self, const at::Tensor& tensor, int src, bool async_op, const Text& layout) {
            if (src < 0 || src >= self->size())
              refuse("broadcast", "src ", src, " is not a rank of 0..", self->size() - 1);
            return start(self, Collective::Broadcast, tensor, tensor, ReduceOp::Sum, src, async_op, layout);
          },
          py::arg("tensor"), py::arg("src"), py::arg("async_op") = false, py::arg("layout") = "",
          "Overwrites `tensor` by that of rank `src`. `layout`, if given, says what the bytes mean: it must be the "
          "same on all ranks, and is what errors call this broadcast.")
      .def(
          "reduce_scatter",
          [](const Shared& self, const at::Tensor& output, const at::Tensor& input, const std::string& op,
             bool async_op) {
            require_parts("reduce_scatter", input, output, self->size());
            return start(self, Collective::ReduceScatter, input, output, op_of(op), kNoRoot, async_op);
          },
          py::arg("output"), py::arg("input"), py::arg("op") = "sum", py::arg("async_op") = false,
          "Reduces `input` (size() * output.numel() elements) over all ranks; rank r keeps part r in `output`.")
      .def(
          "all_gather",
          [](const Shared& self, const at::Tensor& output, const at::Tensor& input, bool async_op) {
            require_parts("all_gather", output, input, self->size());
            return start(self, Collective::AllGather, input, output, ReduceOp::Sum, kNoRoot, async_op);
          },
          py::arg("output"), py::arg("input"), py::arg("async_op") = false,
          "Collects every rank's `input` in `output` (size() * input.numel() elements), in rank order.")
      .def(
          "barrier",
          [](const Shared& self, bool async_op, std::optional<c10::Device> device) {
            auto nothing = at::empty({0}, at::TensorOptions().dtype(at::kByte).device(device.value_or(at::kCPU)));
            return start(self, Collective::Barrier, nothing, nothing, ReduceOp::Sum, kNoRoot, async_op);
          },
          py::arg("async_op") = false, py::arg("device") = py::none(),
          "Returns when every rank has called it; with a CUDA `device` its current stream waits instead.")
      .def(
          "split",
          [](Communicator& self, const std::vector<int>& ranks) { return self.split(ranks, raise_pending_signal); },
          py::arg("ranks"), py::call_guard<py::gil_scoped_release>(),
          "Makes a communicator of `ranks`, which are ranks of this one, with this rank among them; returns None "
          "for an empty list. Every rank must call it.")
      .def(
          "shrink",
          [](Communicator& self, double patience) {
            require_seconds("shrink(patience=...)", patience);
            return self.shrink(seconds(patience), raise_pending_signal);
          },
          py::arg("patience") = 30.0, py::call_guard<py::gil_scoped_release>(),
          "Makes a communicator of the members that are left after a failure, in their order. Each of them must "
          "call it. Members that have not called it after `patience` seconds are left out, and their call raises "
          "Aborted.")
      .def("empty", &empty, py::arg("sizes"), py::arg("dtype"), py::arg("device") = py::none(),
           "Makes an uninitialized tensor in memory that the local peers read and write in place: collectives on it "
           "copy nothing. The call is collective if `device` is a CUDA device.")
      .def(
          "abort", [](Communicator& c, const Text& text, const std::string& error) { c.abort(kind_of(error), text); },
          py::arg("text"), py::arg("error") = "Aborted", py::call_guard<py::gil_scoped_release>(),
          "Fails everything pending, here and on all peers, which raise `error` (the name of a class of "
          "syncengine.errors) with `text`.")
      .def("check_peers", &Communicator::check_peers, py::call_guard<py::gil_scoped_release>(),
           "Raises the error with which this communicator has failed, if it has, after a look at the other ranks.")
      .def_property_readonly("hosts", &Communicator::hosts, "The host of each member, numbered from 0.")
      .def("ended", &Communicator::ended, py::call_guard<py::gil_scoped_release>(),
           "The ranks in the job of the other members whose processes are known to have ended.")
      .def(
          "close_devices", [](const Communicator& self) { close_devices(&self); },
          py::call_guard<py::gil_scoped_release>(),
          "Closes a failed communicator's queues on CUDA devices, which would keep the communicator alive. Waits for "
          "the devices. Memory that a peer may still have mapped stays allocated until the process ends. Not "
          "collective.")
      .def(
          "exception", [](const Communicator& self) { return exception_of([&] { self.throw_if_failed(); }); },
          "The error with which the communicator has failed, and which each later call raises, or None.")
      .def(
          "close",
          [](Communicator& self) {
            close_devices(&self);
            self.close();
            InFlight::of_process().deliver_ended();  // calls in flight keep the communicator
          },
          py::call_guard<py::gil_scoped_release>(), "Leaves the communicator in good order.")
      .def(
          "counters",
          [](const Communicator& self) {
            auto counters = self.counters();
            counters.merge(device_counters(&self));
            return counters;
          },
          py::call_guard<py::gil_scoped_release>(),
          "Counters of this rank's work so far: operations, bytes by path, bytes sent to other hosts, sleeps.");
}

void bind_backend(py::module_& module) {
  py::module_::import("torch.distributed");  // registers the base class of Backend
  py::class_<TorchBackend, c10::intrusive_ptr<TorchBackend>, ::c10d::Backend>(
      module, "Backend", "The torch.distributed backend: a communicator with c10d's interface.")
      .def(py::init<std::shared_ptr<Communicator>>(), py::arg("communicator"))
      .def_property_readonly("communicator", &TorchBackend::communicator, "The engine's communicator below.")
      .def(
          "split",
          [](TorchBackend& self, const std::vector<int>& ranks) { return self.split(nullptr, ranks, nullptr); },
          py::arg("ranks"), py::call_guard<py::gil_scoped_release>(),
          "The backend of `ranks` of this group, in ascending order; None on a rank that is not among them. Every rank "
          "must call it.")
      .def(
          "perform_nocolor_split", [](TorchBackend&, const py::object&) {}, py::arg("device"),
          "Does nothing. torch calls it on ranks that a new group leaves out, if the default group is bound to a "
          "CPU.")
      .def_property_readonly(
          "options", [](TorchBackend& self) { return self.getBackendOptions(); },
          "The settings of the backend that torch keeps.");
  module.def("backend_communicators", &TorchBackend::open_communicators);
  module.def("end_backends", &TorchBackend::end_all, py::call_guard<py::gil_scoped_release>());
}

}  // namespace syncengine
