#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/dtype.h"
#include "base/error.h"
#include "bindings/bindings.h"
#include "bindings/device.h"
#include "c10d/backend.h"
#include "c10d/torch_dtype.h"
#include "collectives/operation.h"
#include "engine/communicator/communicator.h"
#include "reducer/torch/in_flight.h"
#include "reducer/torch/tensors.h"
#include "streams/queue.h"

namespace py = pybind11;

namespace syncengine {

namespace {

// Tensors as the engine sees them: spans and element types.

DType dtype_of(at::ScalarType type, const char* what) {
  if (auto dtype = same_dtype(type)) return *dtype;
  throw Error(ErrorKind::InvalidUsage,
              std::string(what) + ": dtype " + c10::toString(type) +
                  " is not supported; use float16, bfloat16, float32, float64, int8 to int64, uint8 or bool");
}

ReduceOp op_of(const std::string& text) {
  for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max}) {
    if (text == name(op)) return op;
  }
  throw Error(ErrorKind::InvalidUsage, "op '" + text + "' is not one of 'sum', 'avg', 'product', 'min', 'max'");
}

// Dense, both on CPUs or both on one CUDA device.
void require_one_device(const at::Tensor& input, const at::Tensor& output, const char* what) {
  for (const at::Tensor& tensor : {input, output}) {
    std::string why = why_not_dense(tensor);
    if (why.empty() && !tensor.device().is_cpu() && !tensor.device().is_cuda()) why = "one on " + tensor.device().str();
    if (why.empty()) why = why_without_memory(tensor);
    if (!why.empty())
      throw Error(ErrorKind::InvalidUsage,
                  std::string(what) + ": needs a dense tensor on a CPU or CUDA device, not " + why);
  }
  if (input.device() != output.device())
    throw Error(ErrorKind::InvalidUsage, std::string(what) + ": input is on " + input.device().str() + ", output on " +
                                             output.device().str() + "; move one of them");
}

// The engine's work, and where the result still has to go.
class CpuWork final : public PyWork {
 public:
  struct Pending {
    void finish(std::optional<Duration> at_most) {
      communicator->wait(work, raise_pending_signal, at_most);
      std::call_once(delivered, [this] {  // a tensor that is not contiguous was reduced as a contiguous copy
        if (result.defined()) assign(target, result);
        result.reset();
      });
    }

    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<Work> work;
    at::Tensor target, result;
    std::once_flag delivered = {};
  };
  explicit CpuWork(std::shared_ptr<Pending> pending) : pending_(std::move(pending)) {}

  void wait(std::optional<double> timeout) override {
    py::gil_scoped_release nogil;
    std::optional<Duration> at_most;
    if (timeout) at_most = seconds(*timeout);
    pending_->finish(at_most);
  }
  bool is_completed() const override { return pending_->work->ended(); }
  py::object exception() const override {
    return exception_of([this] { pending_->work->rethrow_if_failed(); });
  }

 private:
  std::shared_ptr<Pending> pending_;
};

SpanList spans_of(const at::Tensor& tensor) { return {tensor.data_ptr(), tensor.nbytes()}; }

// Any dense layout will do where all ranks have the same; otherwise a contiguous copy, as where the memory holds the
// elements' negatives (x.conj().imag is lazy).
at::Tensor dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor.resolve_neg() : tensor.contiguous().resolve_neg();
}

bool goes_through_copy(const at::Tensor& tensor, bool in_place) {
  return tensor.is_neg() || !(in_place ? tensor.is_non_overlapping_and_dense() : tensor.is_contiguous());
}

// What the engine holds while an operation runs: memory, not tensors. Any thread may let go of it, and the last
// reference to a tensor besides Python's would make torch wait for the GIL there.
struct Kept {
  c10::Storage input, output;
};

// Shape, and the order of elements where it is not row by row. FNV-1a.
uint64_t layout_hash(const at::Tensor& tensor) {
  uint64_t hash = 0xcbf29ce484222325;
  auto mix = [&hash](int64_t value) { hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3; };
  for (int64_t size : tensor.sizes()) mix(size);
  if (!tensor.is_contiguous())
    for (int64_t stride : tensor.strides()) mix(stride);
  return hash;
}

std::unique_ptr<PyWork> start(const std::shared_ptr<Communicator>& communicator, Collective collective,
                              const at::Tensor& input, const at::Tensor& output, ReduceOp op, int root, bool async_op,
                              const std::string& layout = "") {
  const char* what = name(collective);
  Operation operation;
  at::Tensor from, to, target = output, result;
  {
    at::NoGradGuard no_grad;
    bool in_place = input.is_same(output);
    require_one_device(input, output, what);
    for (const at::Tensor& tensor : {input, output})
      InFlight::of_process().await(tensor, goes_through_copy(tensor, in_place));
    from = in_place ? dense(input) : input.contiguous().resolve_neg();
    to = in_place                                     ? from
         : output.is_contiguous() && !output.is_neg() ? output
                                                      : at::empty(output.sizes(), output.options());
    if (!to.is_same(output)) result = to;
    if (result.defined() && at::has_internal_overlap(output) == at::MemOverlap::Yes)
      throw Error(ErrorKind::InvalidUsage,
                  std::string(what) +
                      ": several elements of the tensor that is written lie in the same memory, as expand() " +
                      "makes them: give it memory of its own, as by clone()");
    // The engine wants the same memory or none in common; but an all-gather's input may lie in its place.
    const bool has_its_place = collective == Collective::AllGather &&
                               from.const_data_ptr() == static_cast<const std::byte*>(to.const_data_ptr()) +
                                                            communicator->rank() * from.nbytes();
    if (!in_place && !has_its_place && at::get_overlap_status(from, to) != at::MemOverlapStatus::No)
      from = from.clone();
    operation.collective = collective;
    operation.dtype = dtype_of(output.scalar_type(), what);
    operation.op = op;
    operation.numerics = communicator->numerics();
    operation.root = root;
    operation.postscale = op == ReduceOp::Avg ? 1.0 / communicator->size() : 1.0;
    operation.input = spans_of(from);
    operation.output = spans_of(to);
    operation.layout_hash = in_place ? layout_hash(from) : 0;
    if (!layout.empty()) {
      for (unsigned char letter : layout) operation.layout_hash = (operation.layout_hash ^ letter) * 0x100000001b3;
      operation.describe = [layout] { return layout; };
    }
    operation.keepalive = std::make_shared<Kept>(from.storage(), to.storage());
  }
  if (from.is_cuda()) return run_on_device(communicator, std::move(operation), from, to, target, result, async_op);
  py::gil_scoped_release nogil;
  if (async_op) {
    InFlight::Call call{
        .memory = {extent_of(input), extent_of(output)}, .copies = result.defined(), .communicator = communicator};
    auto pending = std::make_shared<CpuWork::Pending>(communicator, communicator->submit(std::move(operation)),
                                                      std::move(target), std::move(result));
    call.works = {pending->work};
    if (call.copies) call.deliver = [pending] { pending->finish({}); };
    InFlight::of_process().add(std::move(call));
    return std::make_unique<CpuWork>(std::move(pending));
  }
  communicator->run(std::move(operation), raise_pending_signal);
  if (result.defined()) assign(target, result);
  return nullptr;
}

ErrorKind kind_of(const std::string& error) {
  for (ErrorKind kind :
       {ErrorKind::PeerLost, ErrorKind::Timeout, ErrorKind::Mismatch, ErrorKind::Aborted, ErrorKind::InvalidUsage})
    if (error == name(kind)) return kind;
  throw Error(ErrorKind::InvalidUsage, "abort: '" + error + "' is no class of syncengine.errors");
}

at::Tensor empty(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& sizes,
                 at::ScalarType type, std::optional<c10::Device> device) {
  dtype_of(type, "empty");
  int64_t elements = 1;
  for (int64_t extent : sizes) {
    if (extent < 0) throw Error(ErrorKind::InvalidUsage, "empty: negative size " + std::to_string(extent));
    elements *= extent;
  }
  const size_t bytes = static_cast<size_t>(elements) * c10::elementSize(type);
  if (device && !device->is_cpu()) return empty_on_device(communicator, sizes, bytes, type, *device);
  auto memory = communicator->allocate(bytes);
  return at::from_blob(
      memory.get(), sizes, [memory](void*) mutable { memory.reset(); }, at::TensorOptions().dtype(type));
}

}  // namespace

void bind_communicator(py::module_& module) {
  // Whoever may hold the last reference to a communicator goes without the GIL: its end is that of the engine's thread,
  // which may be waiting for the GIL itself.
  const py::release_gil_before_calling_cpp_dtor without_gil;
  py::class_<PyWork>(module, "Work", "The future of one asynchronous collective.", without_gil)
      .def("wait", &PyWork::wait, py::arg("timeout") = py::none(),
           "Blocks until the collective has ended; raises its error. `timeout` in seconds: past it the communicator is "
           "aborted with Timeout, since the tensor is in use.")
      .def("is_completed", &PyWork::is_completed,
           "Whether it ended, well or not. Tensors that are not contiguous hold the "
           "result only after wait().")
      .def("exception", &PyWork::exception, "The error it ended with, or None.");

  using Shared = std::shared_ptr<Communicator>;
  py::class_<Communicator, Shared>(module, "Communicator", "A group of ranks that run collectives together.",
                                   without_gil)
      .def_property_readonly("rank", &Communicator::rank, "This process's rank in the group.")
      .def_property_readonly("size", &Communicator::size, "Number of ranks in the group.")
      .def_property_readonly("global_ranks", &Communicator::global_ranks, "Of each member, its rank in the whole job.")
      .def_property_readonly(
          "numerics", [](const Communicator& c) { return name(c.numerics()); }, "'rank_order', 'ring' or 'fast'.")
      .def_property_readonly(
          "timeout", [](const Communicator& c) { return std::chrono::duration<double>(c.timeout()).count(); },
          "Seconds after which a collective gives up.")
      .def_property_readonly("links", &Communicator::describe_links,
                             "Between hosts: which way collectives take, and what was measured. Empty on one host.")
      .def(
          "all_reduce",
          [](const Shared& self, const at::Tensor& tensor, const std::string& op, bool async_op) {
            return start(self, Collective::AllReduce, tensor, tensor, op_of(op), kNoRoot, async_op);
          },
          py::arg("tensor"), py::arg("op") = "sum", py::arg("async_op") = false,
          "Reduces `tensor` in place over all ranks: same shape, strides and dtype everywhere.")
      .def(
          "broadcast",
          [](const Shared& self, const at::Tensor& tensor, int src, bool async_op, const std::string& layout) {
            if (src < 0 || src >= self->size())
              throw Error(ErrorKind::InvalidUsage, "broadcast: src " + std::to_string(src) + " is not a rank of 0.." +
                                                       std::to_string(self->size() - 1));
            return start(self, Collective::Broadcast, tensor, tensor, ReduceOp::Sum, src, async_op, layout);
          },
          py::arg("tensor"), py::arg("src"), py::arg("async_op") = false, py::arg("layout") = "",
          "Overwrites `tensor` by rank `src`'s. `layout`, if any, says what the bytes mean: it must be the same on all "
          "ranks, and is what errors call this.")
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
          [](Communicator& self, const std::vector<int>& ranks) {
            py::gil_scoped_release nogil;
            return self.split(ranks, raise_pending_signal);
          },
          py::arg("ranks"),
          "A communicator of `ranks` (of this one, this rank among them); None for an empty list. Every rank must call "
          "it.")
      .def(
          "shrink",
          [](Communicator& self, double patience) {
            py::gil_scoped_release nogil;
            return self.shrink(seconds(patience), raise_pending_signal);
          },
          py::arg("patience") = 30.0,
          "After a failure: a communicator of the members that are left, in their order. Each of them must call it. "
          "Those that have not after `patience` seconds are left out, and raise Aborted when they do.")
      .def("empty", &empty, py::arg("sizes"), py::arg("dtype"), py::arg("device") = py::none(),
           "An uninitialized tensor in memory that the local peers read and write in place: collectives on it copy "
           "nothing. On a CUDA `device` a collective call.")
      .def(
          "abort",
          [](Communicator& c, const std::string& text, const std::string& error) { c.abort(kind_of(error), text); },
          py::arg("text"), py::arg("error") = "Aborted", py::call_guard<py::gil_scoped_release>(),
          "Fails everything pending, here and on all peers, which raise `error` (a class of syncengine.errors, by "
          "name) "
          "with `text`.")
      .def("check_peers", &Communicator::check_peers, py::call_guard<py::gil_scoped_release>(),
           "Raises the error that this communicator has failed with, if it has, after a look at the other ranks.")
      .def_property_readonly("hosts", &Communicator::hosts, "Of each member, its host, numbered from 0.")
      .def("dead", &Communicator::dead, py::call_guard<py::gil_scoped_release>(),
           "Of the members on this host, counted among themselves, those whose processes have died.")
      .def(
          "close_devices", [](const Communicator& self) { close_devices(&self); },
          py::call_guard<py::gil_scoped_release>(), "Lets go of what it has on CUDA devices: it has failed.")
      .def(
          "exception", [](const Communicator& self) { return exception_of([&] { self.throw_if_failed(); }); },
          "The error with which it has failed, which each later call raises, or None.")
      .def(
          "close",
          [](Communicator& self) {
            close_devices(&self);
            self.close();
          },
          py::call_guard<py::gil_scoped_release>(), "Leaves in good order.")
      .def(
          "counters",
          [](const Communicator& self) {
            auto counters = self.counters();
            counters.merge(device_counters(&self));
            return counters;
          },
          py::call_guard<py::gil_scoped_release>(),
          "What this rank did so far: operations, bytes by path, bytes sent to other hosts, sleeps.");
}

}  // namespace syncengine
