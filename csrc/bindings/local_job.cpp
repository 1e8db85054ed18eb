#include <pybind11/stl.h>

#include "bindings/bindings.h"
#include "bindings/communicator.h"
#include "bindings/errors.h"
#include "bindings/python_threads.h"
#include "engine/local_job.h"
#include "engine/solo.h"

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
  result.numerics =
      choose<Numerics>(options, "numerics", {{"rank_order", Numerics::RankOrder}, {"ring", Numerics::Ring}});
  result.algorithm = choose<Algorithm>(options, "algorithm",
                                       {{"auto", Algorithm::Auto},
                                        {"direct", Algorithm::Direct},
                                        {"staged", Algorithm::Staged},
                                        {"one_shot", Algorithm::OneShot}});
  result.gradient_memory = choose<GradientMemory>(options, "gradient_memory",
                                                  {{"arena", GradientMemory::Arena}, {"torch", GradientMemory::Torch}});
  result.timeout = seconds(options["timeout"].cast<double>());
  result.log_after = seconds(options["log_after"].cast<double>());
  result.arena_bytes = options["arena_bytes"].cast<size_t>();
  return result;
}

}  // namespace

void bind_local_job(py::module_& module) {
  py::class_<LocalJob>(module, "LocalBootstrap", "How the ranks of one host find each other's memory.")
      .def(py::init([](int rank, int size, const py::dict& options) {
             return std::make_unique<LocalJob>(rank, size, parse(options), count_python_threads);
           }),
           py::arg("rank"), py::arg("size"), py::arg("options"))
      .def(
          "address", [](const LocalJob& job) { return py::bytes(job.address()); }, "Opaque bytes for every other rank.")
      .def(
          "connect",
          [](LocalJob& job, const std::vector<std::string>& addresses, double timeout,
             const std::optional<std::vector<int>>& global_ranks) {
            py::gil_scoped_release nogil;
            return for_python(job.connect(addresses, Deadline::after(seconds(timeout)), check_signals(),
                                          global_ranks.value_or(std::vector<int>{})));
          },
          py::arg("addresses"), py::arg("timeout"), py::arg("global_ranks") = py::none(),
          "The communicator of all ranks. `addresses` by rank; `timeout` in seconds.");
  module.def(
      "solo", [](const py::dict& options) { return make_solo_communicator(parse(options)); }, py::arg("options"),
      "The communicator of a job of one rank: no thread, no shared memory.");
}

}  // namespace syncengine
