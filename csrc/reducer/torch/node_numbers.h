// Autograd numbers the nodes that a thread makes. So they tell whether one was made before or after some moment.
#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>

namespace syncengine {

// A moment on one thread. Of other threads' nodes nothing is known.
struct NodeNumber {
  uint64_t next = 0, thread = 0;

  static NodeNumber now() { return {at::sequence_number::peek(), at::RecordFunction::currentThreadId()}; }
  bool is_after(const torch::autograd::Node& node) const {
    return node.thread_id() == thread && node.sequence_nr() < next;
  }
  bool is_before(const torch::autograd::Node& node) const {
    return node.thread_id() == thread && node.sequence_nr() >= next;
  }
};

}  // namespace syncengine
