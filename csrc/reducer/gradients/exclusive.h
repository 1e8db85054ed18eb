// Whether .grad is all that will ever look at its memory. Autograd lets .grad take over a tensor whose memory others
// may have yet to read in the same backward, and two parameters may take over one memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace syncengine {

bool shares_storage(const at::TensorBase& a, const at::TensorBase& b);

// Whether something else may still look at the memory that `grad` took over from `incoming`, if it did.
// `references`: how many the engine and the caller have to `incoming`.
bool is_shared(const at::Tensor& grad, const at::Tensor& incoming, size_t references = 1);

// For whom only a post-accumulate hook tells of gradients, which is not given what came: from now on each of these
// leaves notes that, until somebody clears its hooks (as Tensor.register_hook does). Not while backward runs.
void note_incoming(const std::vector<at::Tensor>& parameters);

// Whether nobody else can read or write the memory of the parameter's dense .grad: in its post-accumulate hook, or at
// any time later. What was not noted counts as somebody else.
bool owns_gradient(const at::Tensor& parameter);

}  // namespace syncengine
