#include "reducer/torch/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/input_metadata.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <typeinfo>
#include <utility>

#include "base/error.h"
#include "reducer/torch/python_error.h"
#include "steps/texts.h"

namespace syncengine {

namespace {

using torch::autograd::variable_list;

// Calls the listener in a backward that averages. If it throws, gradients are dropped before anyone knows of the error.
void call_in_backward(AutogradListener& listener, auto&& call) {
  try {
    call();
  } catch (...) {
    listener.on_backward_failed(text_for_peers());
    rethrow_for_autograd();
  }
}

// Throws InvalidUsage where compiled autograd asks a hook for a form that can be traced.
[[noreturn]] void refuse_compiled_autograd() {
  throw_for_autograd(
      Error(ErrorKind::InvalidUsage,
            "syncengine.Parallel does not work with compiled autograd, which runs backward as one graph instead of "
            "while gradients are averaged: leave torch._dynamo.config.compiled_autograd off. torch.compile compiles "
            "the model's forward and backward without it, also with optimize_ddp=\"python_reducer\""));
}

class AfterAccumulate : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulate(AutogradListener& listener, size_t index) : listener_(listener), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    call_in_backward(listener_, [&] { listener_.on_gradient(index_, inputs[0]); });
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }
  const AutogradListener& listener() const { return listener_; }

 private:
  AutogradListener& listener_;
  size_t index_;
};

class BeforeOutput : public torch::autograd::FunctionPreHook {
 public:
  BeforeOutput(std::weak_ptr<AutogradListener> listener, std::shared_ptr<Forward> forward)
      : listener_(std::move(listener)), forward_(std::move(forward)) {}

  variable_list operator()(const variable_list& grads) override {
    if (auto listener = listener_.lock()) {
      call_in_backward(*listener, [&] { listener->on_output(forward_.get()); });
    }
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::weak_ptr<AutogradListener> listener_;
  std::shared_ptr<Forward> forward_;
};

// Notes which gradient came. The note belongs to the parameter, which has one at most, and keeps nothing alive.
class IncomingNote : public torch::autograd::FunctionPreHook {
 public:
  variable_list operator()(const variable_list& gradients) override {
    incoming_ = gradients[0].getIntrusivePtr();
    return gradients;
  }
  // Does nothing under compiled autograd, where no gradient is noted.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {}
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

// Takes the place of the user's hooks, and runs them later. If a module is wrapped twice, two reducers own this hook.
class PostponedHooks : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit PostponedHooks(std::unique_ptr<PostAccumulateGradHook> users) : users_(std::move(users)) {}

  void operator()(const at::Tensor& parameter) override {
    if (!any_awaits()) run(parameter);
  }
  void run(const at::Tensor& parameter) { (*users_)(parameter); }

  void add(const std::shared_ptr<AutogradListener>& listener) {
    remove(*listener);
    const std::lock_guard lock(mutex_);
    owners_.push_back(listener);
  }
  // Removes an owner of the hooks; returns whether no other is left.
  bool remove(const AutogradListener& listener) {
    const std::lock_guard lock(mutex_);
    std::erase_if(owners_, [&](const auto& owner) { return owner.expired() || owner.lock().get() == &listener; });
    return owners_.empty();
  }
  std::unique_ptr<PostAccumulateGradHook> release() { return std::move(users_); }

 private:
  bool any_awaits() {
    const std::lock_guard lock(mutex_);
    return std::any_of(owners_.begin(), owners_.end(), [](const auto& owner) {
      const auto listener = owner.lock();
      return listener && listener->has(Interest::Awaits);
    });
  }

  std::mutex mutex_;
  std::vector<std::weak_ptr<AutogradListener>> owners_;
  std::unique_ptr<PostAccumulateGradHook> users_;
};

std::unique_ptr<torch::autograd::PostAccumulateGradHook>* hooks_of(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return &torch::autograd::impl::post_acc_grad_hooks(parameter);
}

PostponedHooks* postponed_hooks(const at::Tensor& parameter) {
  auto* hooks = hooks_of(parameter);
  return hooks ? dynamic_cast<PostponedHooks*>(hooks->get()) : nullptr;
}

// Whether the hook is one whose Python handles have all been removed. torch does not export the class's type_info.
bool is_empty_python_hook(const torch::autograd::FunctionPostHook& hook) {
  if (std::strstr(typeid(hook).name(), "18PyFunctionPostHook") == nullptr) return false;
  const pybind11::gil_scoped_acquire gil;
  return PyDict_Size(static_cast<const torch::autograd::PyFunctionPostHook&>(hook).dict) == 0;
}

}  // namespace

GradientHook::GradientHook(AutogradListener& listener, size_t index, const at::Tensor& parameter)
    : listener_(listener),
      node_(torch::autograd::impl::grad_accumulator(parameter)),
      key_(node_->add_post_hook(std::make_unique<AfterAccumulate>(listener, index))) {}

bool GradientHook::fits(const at::Tensor& parameter) const {
  return node_ == torch::autograd::impl::try_get_grad_accumulator(parameter) &&
         node_->input_metadata(0).is_same_shape(parameter);
}

// Makes the parameter forget its node, as torch does when `.data` changes dtype: a graph or other hooks may hold it.
void GradientHook::take_node_from(const at::Tensor& parameter) const {
  if (node_ != torch::autograd::impl::try_get_grad_accumulator(parameter)) return;
  auto* meta = torch::autograd::impl::get_autograd_meta(parameter);
  std::lock_guard lock(meta->mutex_);
  meta->grad_accumulator_.reset();
}

bool GradientHook::is_alone() const {
  const auto& hooks = node_->post_hooks();
  const size_t ours = std::count_if(hooks.begin(), hooks.end(), [](const auto& hook) {
    return dynamic_cast<const AfterAccumulate*>(hook.get()) != nullptr;
  });
  const size_t holders = node_.use_count();
  return holders == ours || (holders == ours + 1 && python_let_go(*node_));
}

bool GradientHook::others_are_users() const {
  const auto& hooks = node_->post_hooks();
  return hooks.size() > 1 && std::any_of(hooks.begin(), hooks.end(), [](const auto& hook) {
           return dynamic_cast<const AfterAccumulate*>(hook.get()) == nullptr && !is_empty_python_hook(*hook);
         });
}

bool GradientHook::any_other_has(Interest interest) const {
  const auto& hooks = node_->post_hooks();
  return hooks.size() > 1 && std::any_of(hooks.begin(), hooks.end(), [&](const auto& hook) {
           const auto* other = dynamic_cast<const AfterAccumulate*>(hook.get());
           return other != nullptr && &other->listener() != &listener_ && other->listener().has(interest);
         });
}

const torch::autograd::Node* hook_output(const std::weak_ptr<AutogradListener>& listener, const at::Tensor& output,
                                         const std::shared_ptr<Forward>& forward, const NodeNumber& began) {
  const auto& node = output.grad_fn();
  if (node && began.is_after(*node)) return nullptr;
  if (node) node->add_pre_hook(std::make_unique<BeforeOutput>(listener, forward));
  return node.get();
}

void at_task_end(std::function<void()> reached, std::function<void(bool)> gone) {
  struct TaskEnd {
    ~TaskEnd() { gone(was_reached); }
    std::function<void()> reached;
    std::function<void(bool)> gone;
    bool was_reached = false;
  };
  const std::shared_ptr<TaskEnd> end(new TaskEnd{std::move(reached), std::move(gone)});
  torch::autograd::Engine::get_default_engine().queue_callback([end] {
    end->was_reached = true;
    end->reached();
  });
}

void queue_backward_end(std::shared_ptr<AutogradListener> listener, uint64_t backward, uint64_t forwards) {
  at_task_end(
      [listener] {
        try {
          listener->on_backward_end();
        } catch (...) {
          rethrow_for_autograd();
        }
      },
      [listener, backward, forwards](bool reached) {
        if (!reached) listener->on_task_failed(backward, forwards);
      });
}

void tell_of_outer_task(std::weak_ptr<AutogradListener> listener, bool is_ours) {
  at_task_end([] {},
              [listener, is_ours](bool) {
                if (!GraphTasks::inside()) return;
                if (auto alive = listener.lock()) alive->on_outer_task(is_ours);
              });
}

void fail_at_task_end(const std::string& text) {
  torch::autograd::Engine::get_default_engine().queue_callback(
      [text] { throw_for_autograd(Error(ErrorKind::InvalidUsage, text)); });
}

bool postpone_user_hooks(const std::shared_ptr<AutogradListener>& listener, const at::Tensor& parameter) {
  auto* hooks = hooks_of(parameter);
  if (hooks == nullptr || !*hooks) return false;
  if (postponed_hooks(parameter) == nullptr) *hooks = std::make_unique<PostponedHooks>(std::move(*hooks));
  postponed_hooks(parameter)->add(listener);
  return true;
}

UserHooks user_hooks_on(const at::Tensor& parameter) {
  auto* hooks = hooks_of(parameter);
  if (hooks == nullptr || !*hooks) return UserHooks::None;
  return postponed_hooks(parameter) ? UserHooks::Postponed : UserHooks::Hasty;
}

bool has_hasty_optimizer(const at::Tensor& parameter) {
  const pybind11::gil_scoped_acquire gil;
  const auto modules = pybind11::module_::import("sys").attr("modules");
  const char* name = "torch.distributed.optim.apply_optimizer_in_backward";
  if (!modules.contains(name)) return false;
  const auto handles = modules[name].attr("param_to_optim_hook_handle_map");
  return handles.contains(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(parameter)));
}

void run_user_hooks(const at::Tensor& parameter) {
  if (auto* hooks = postponed_hooks(parameter)) hooks->run(parameter);
}

void restore_user_hooks(const AutogradListener& listener, const at::Tensor& parameter) {
  auto* hooks = postponed_hooks(parameter);
  if (hooks == nullptr || !hooks->remove(listener)) return;
  torch::autograd::impl::post_acc_grad_hooks(parameter) = hooks->release();
}

void note_incoming(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    if (find_note(parameter) != nullptr) continue;
    torch::autograd::impl::materialize_autograd_meta(parameter);
    torch::autograd::impl::hooks(parameter).push_back(std::make_unique<IncomingNote>());  // add_hook() takes only one
  }
}

at::Tensor noted_gradient(const at::Tensor& parameter) {
  const auto* note = find_note(parameter);
  return note != nullptr ? note->incoming() : at::Tensor();
}

}  // namespace syncengine
