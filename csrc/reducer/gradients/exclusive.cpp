#include "reducer/gradients/exclusive.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>

#include "reducer/gradients/cpu_allocator.h"
#include "reducer/torch/python_wrappers.h"

namespace syncengine {

bool shares_storage(const at::TensorBase& a, const at::TensorBase& b) {
  return a.has_storage() && b.defined() && b.has_storage() &&
         a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

namespace {

using torch::autograd::variable_list;

// True if `tensor` is held by so many C++ references and by nothing in Python.
bool has_holders(const at::TensorBase& tensor, size_t references) {
  return tensor.use_count() == references ||
         (tensor.use_count() == references + 1 && python_let_go(*tensor.unsafeGetTensorImpl()));
}

// Whether `grad`, which took over the memory of `incoming`, is all that will ever look at that memory: every holder is
// known, and goes with `incoming`, which the engine is about to drop; and the memory itself is torch's (not, say, a
// numpy array's).
bool took_over_exclusively(const at::Tensor& grad, const at::Tensor& incoming, size_t references) {
  if (!has_holders(incoming, references)) return false;
  size_t known_holders = 2;
  if (incoming.is_view()) {  // the weight of every nn.Linear: the transpose of a product
    const at::TensorBase& base = incoming._base();
    if (has_holders(base, 1) && shares_storage(grad, base)) ++known_holders;
  }
  const auto& storage = grad.storage();
  return storage.use_count() == known_holders && gradient_memory::is_tensor_memory(storage.data_ptr());
}

// Belongs to the parameter, which has one at most, and holds nothing.
class IncomingNote : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list& gradients) override {
    incoming_ = gradients[0].getIntrusivePtr();
    return gradients;
  }
  // Under compiled autograd nothing is noted.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
  // Undefined if it is gone.
  at::Tensor incoming() const { return at::Tensor(incoming_.lock()); }

 private:
  c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> incoming_{
      c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>()};
};

const IncomingNote* find_note(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  for (const auto& hook : torch::autograd::impl::hooks(parameter)) {
    if (const auto* note = dynamic_cast<const IncomingNote*>(hook.get())) return note;
  }
  return nullptr;
}

}  // namespace

bool is_shared(const at::Tensor& grad, const at::Tensor& incoming, size_t references) {
  return shares_storage(grad, incoming) && !took_over_exclusively(grad, incoming, references);
}

void note_incoming(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (find_note(parameter) != nullptr) continue;
    torch::autograd::impl::materialize_autograd_meta(parameter);
    torch::autograd::impl::hooks(parameter).push_back(std::make_unique<IncomingNote>());  // add_hook() takes only one
  }
}

bool owns_gradient(const at::Tensor& parameter) {
  const at::Tensor& grad = parameter.grad();
  const auto* note = find_note(parameter);
  const at::Tensor incoming = note != nullptr ? note->incoming() : at::Tensor();
  if (shares_storage(grad, incoming)) return !is_shared(grad, incoming, /*references=*/2);
  return grad.storage().use_count() == 1;
}

}  // namespace syncengine
