// Weights that the ranks of a host have in common, all at once: with thousands of them, looking at each from Python
// takes longer than updating it. No thread of its own: for the one that steps the optimizer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace syncengine {

// What parameters were like when this rank last looked, so that it sees who has written to them since.
class WatchedWeights {
 public:
  // Where they lie is noted here alone: another thread may move them at any time (by sending them to a process, say).
  explicit WatchedWeights(const std::vector<at::Tensor>& parameters);

  // Their versions are as they should be.
  void note();
  // All ranks have updated them: raises their versions, so that graphs from before can't be used; then notes.
  void note_update();
  // The first that lies in other memory than at first, or there in another way; that another version was noted of.
  std::optional<size_t> moved() const;
  std::optional<size_t> written() const;
  // Of each parameter: '\0', it has no gradient; '\1', a dense one; '\2', another.
  std::string gradients() const;

 private:
  struct Noted {
    at::Tensor parameter;
    const void* data = nullptr;
    std::vector<int64_t> sizes, strides;
    uint32_t version = 0;
  };
  std::vector<Noted> noted_;
};

// Parts of parameters, as the tensors that an optimizer updates: they borrow the parameters' gradients for that.
class WeightSlices {
 public:
  struct Slice {
    at::Tensor parameter;
    at::Tensor tensor;  // the whole parameter's elements; or [begin, end) of them as a vector, in order of memory
    int64_t begin = 0;
  };
  explicit WeightSlices(std::vector<Slice> slices) : slices_(std::move(slices)) {}

  // Each tensor's gradient becomes its part of the parameter's, copied where that is laid out otherwise; or none.
  void take_gradients();
  void drop_gradients();

 private:
  std::vector<Slice> slices_;
};

}  // namespace syncengine
