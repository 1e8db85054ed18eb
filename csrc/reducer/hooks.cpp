#include "reducer/hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>

#include "base/error.h"
#include "reducer/python_error.h"
#include "reducer/reducer.h"

namespace syncengine {

namespace {

using torch::autograd::variable_list;

template <class Call>
void call_from_autograd(Call&& call) {
  try {
    call();
  } catch (const Error&) {
    rethrow_for_autograd();
  }
}

// For hooks in a backward that averages: what it has collected is let go before anyone learns of the error.
template <class Call>
void call_in_backward(Reducer& reducer, Call&& call) {
  try {
    call_from_autograd(call);
  } catch (...) {
    reducer.on_backward_failed();
    throw;
  }
}

// Compiled autograd asks every hook for a form that it can trace.
[[noreturn]] void refuse_compiled_autograd() {
  try {
    throw Error(ErrorKind::InvalidUsage,
                "syncengine.Parallel does not work with compiled autograd, which runs backward as one graph instead of "
                "while gradients are averaged: leave torch._dynamo.config.compiled_autograd off. torch.compile "
                "compiles the model's forward and backward without it, also with optimize_ddp=\"python_reducer\"");
  } catch (const Error&) {
    rethrow_for_autograd();
  }
}

class AfterAccumulate : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulate(Reducer& reducer, size_t index) : reducer_(reducer), index_(index) {}

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    call_in_backward(reducer_, [&] { reducer_.on_gradient(index_, inputs[0]); });
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  Reducer& reducer_;
  size_t index_;
};

class BeforeOutput : public torch::autograd::FunctionPreHook {
 public:
  BeforeOutput(std::weak_ptr<Reducer> reducer, void (Reducer::*call)()) : reducer_(std::move(reducer)), call_(call) {}

  variable_list operator()(const variable_list& grads) override {
    if (auto reducer = reducer_.lock()) call_in_backward(*reducer, [&] { (*reducer.*call_)(); });
    return grads;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override { refuse_compiled_autograd(); }

 private:
  std::weak_ptr<Reducer> reducer_;
  void (Reducer::*call_)();
};

// Lives in the callback of one graph task, which destroys it either way.
class BackwardEnd {
 public:
  explicit BackwardEnd(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  ~BackwardEnd() {
    if (reducer_) reducer_->on_backward_abandoned();
  }
  BackwardEnd(const BackwardEnd&) = delete;
  BackwardEnd& operator=(const BackwardEnd&) = delete;

  void reach() {
    auto reducer = std::move(reducer_);
    call_from_autograd([&] { reducer->on_backward_end(); });
  }

 private:
  std::shared_ptr<Reducer> reducer_;
};

class PostponedHook : public torch::autograd::PostAccumulateGradHook {
 public:
  PostponedHook(std::weak_ptr<Reducer> reducer, size_t index, std::unique_ptr<PostAccumulateGradHook> user)
      : reducer_(std::move(reducer)), index_(index), user_(std::move(user)) {}

  void operator()(const at::Tensor& parameter) override {
    auto reducer = reducer_.lock();
    postponed_ = reducer && reducer->postpones(index_);
    if (!postponed_) (*user_)(parameter);
  }
  void run_if_postponed(const at::Tensor& parameter) {
    if (std::exchange(postponed_, false)) (*user_)(parameter);
  }
  std::unique_ptr<PostAccumulateGradHook> release() { return std::move(user_); }

 private:
  std::weak_ptr<Reducer> reducer_;
  size_t index_;
  std::unique_ptr<PostAccumulateGradHook> user_;
  bool postponed_ = false;
};

PostponedHook* postponed_hook(const at::Tensor& parameter) {
  if (torch::autograd::impl::get_autograd_meta(parameter) == nullptr) return nullptr;
  return dynamic_cast<PostponedHook*>(torch::autograd::impl::post_acc_grad_hooks(parameter).get());
}

}  // namespace

GradientHook::GradientHook(Reducer& reducer, size_t index, const at::Tensor& parameter)
    : node_(torch::autograd::impl::grad_accumulator(parameter)),
      key_(node_->add_post_hook(std::make_unique<AfterAccumulate>(reducer, index))),
      dtype_(parameter.scalar_type()) {}

GradientHook::~GradientHook() { node_->del_post_hook(key_); }

bool hook_output(const std::weak_ptr<Reducer>& reducer, const at::Tensor& output, void (Reducer::*call)()) {
  const auto& node = output.grad_fn();
  if (node) node->add_pre_hook(std::make_unique<BeforeOutput>(reducer, call));
  return node != nullptr;
}

void use_in_this_task(const std::shared_ptr<gradient_memory::Grant>& grant) {
  struct Revocation {
    std::shared_ptr<gradient_memory::Grant> grant;
    ~Revocation() { grant->revoke(); }
  };
  gradient_memory::use(grant);
  // The task drops its callbacks when it ends, also when it fails.
  auto revocation = std::make_shared<const Revocation>(grant);
  torch::autograd::Engine::get_default_engine().queue_callback([revocation] {
    revocation->grant->revoke();
    revocation->grant->learn();
  });
}

void queue_backward_end(std::shared_ptr<Reducer> reducer) {
  auto end = std::make_shared<BackwardEnd>(std::move(reducer));
  torch::autograd::Engine::get_default_engine().queue_callback([end] { end->reach(); });
}

bool postpone_user_hooks(const std::weak_ptr<Reducer>& reducer, size_t index, const at::Tensor& parameter) {
  auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter);
  if (hook && postponed_hook(parameter) == nullptr) {
    hook = std::make_unique<PostponedHook>(reducer, index, std::move(hook));
  }
  return hook != nullptr;
}

void run_postponed(const at::Tensor& parameter) {
  if (auto* hook = postponed_hook(parameter)) hook->run_if_postponed(parameter);
}

void restore_user_hooks(const at::Tensor& parameter) {
  if (auto* hook = postponed_hook(parameter)) {
    auto user = hook->release();
    torch::autograd::impl::post_acc_grad_hooks(parameter) = std::move(user);
  }
}

}  // namespace syncengine
