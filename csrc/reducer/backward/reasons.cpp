#include "reducer/backward/reasons.h"

#include <algorithm>
#include <utility>

#include "reducer/backward/peers.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

namespace {

constexpr size_t kBytes = 4096;                          // of each rank: a kind, then text up to a zero
constexpr char kRaised = 1, kForGood = 2, kMisused = 3;  // the latter two for good

}  // namespace

// Each rank writes to a part of its own, so that the maximum is all of them.
Reasons::Reasons(const Averaging& averaging, const std::string& model, uint64_t backward,
                 const std::optional<Reason>& own)
    : communicator_(averaging.communicator),
      texts_(std::make_shared<std::vector<char>>(averaging.communicator->size() * kBytes)) {
  Communicator& communicator = *averaging.communicator;
  if (own) {
    char* part = texts_->data() + communicator.rank() * kBytes;
    part[0] = !own->for_good ? kRaised : own->kind == ErrorKind::InvalidUsage ? kMisused : kForGood;
    const std::string text = said_here(communicator, own->text);
    std::copy_n(text.data(), std::min(text.size(), kBytes - 2), part + 1);
  }
  Operation operation;
  operation.dtype = DType::UInt8;
  operation.op = ReduceOp::Max;
  operation.numerics = communicator.numerics();
  operation.output.add(texts_->data(), texts_->size());
  operation.input = operation.output;
  operation.describe = [model] { return "reasons for which a backward of " + model + " was abandoned"; };
  operation.keepalive = texts_;
  work_ = communicator.announce(averaging.slots, averaging.reason_slot(backward), std::move(operation));
}

std::function<bool()> Reasons::agreement() const {
  return [texts = texts_] {
    size_t have_one = 0;
    for (size_t at = 0; at < texts->size(); at += kBytes) {
      const char first = (*texts)[at];
      if (first == kForGood || first == kMisused) return true;
      have_one += first != 0;
    }
    return have_one * kBytes == texts->size();
  };
}

std::optional<Reason> Reasons::wait() {
  communicator_->wait(work_, raise_pending_signal);
  std::optional<Reason> gravest;
  for (int member = 0; member < communicator_->size(); ++member) {
    const char* part = texts_->data() + member * kBytes;
    if (part[0] == kForGood) return Reason{part + 1, true};
    if (part[0] == kMisused) return Reason{part + 1, true, ErrorKind::InvalidUsage};
    if (part[0] != 0 && !gravest) gravest = Reason{part + 1, false};
  }
  return gravest;
}

}  // namespace syncengine
