// What the engine can take: elements that lie in memory of their own, each as it is.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace syncengine {

// What `tensor` is instead, for messages: "not ..."; empty if it is dense. On any device.
inline std::string why_not_dense(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  if (tensor.layout() != at::kStrided) return "one of layout " + c10::str(tensor.layout());
  if (tensor.is_nested()) return "a nested one";
  if (tensor.is_quantized()) return "a quantized one";
  return "";
}

// The same of one on a device whose memory is to be read: of some classes only what they consist of has any.
inline std::string why_without_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || (tensor.has_storage() && tensor.storage().data() != nullptr)) return "";
  return "one without memory of its own (as a DTensor, whose to_local() has it)";
}

}  // namespace syncengine
