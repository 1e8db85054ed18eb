// TorchBackend's coalescing: how the calls between startCoalescing() and endCoalescing() become one work, and what
// becomes of those that no end follows.
#include "c10d/backend.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

// One that was left open by an error ends here at the latest.
void TorchBackend::startCoalescing() {
  auto coalesced = std::make_unique<Coalesced>();
  coalesced->dropped = [this](Coalesced& calls) { leave(calls); };
  coalesced->body = CoalescingBody::of_caller([this] { end_left_coalescing(); });
  coalescing_.give(std::move(coalesced));
}

TorchBackend::TorchWorkPtr TorchBackend::endCoalescing() {
  auto coalesced = coalescing_.take();
  if (!coalesced) throw Error(ErrorKind::InvalidUsage, "no coalescing has begun, or an error has ended it");
  coalesced->dropped = {};
  return finish(*coalesced);
}

// This thread's. A body that has raised is over: torch tells of no end.
std::unique_ptr<Coalesced> TorchBackend::take_coalesced() {
  auto coalesced = coalescing_.take();
  if (coalesced && coalesced->body && coalesced->body->has_ended()) coalesced.reset();
  return coalesced;
}

void TorchBackend::end_left_coalescing() {
  if (auto coalesced = take_coalesced()) coalescing_.give(std::move(coalesced));
}

// What waits by itself, whatever is coalesced around it.
void TorchBackend::stay_out_of_coalescing(Call& call) {
  if (call.coalesced) coalescing_.give(std::move(call.coalesced));
}

// As if each collective had waited, as with Gloo. Not messages: what they wait for may be what was to come.
void TorchBackend::leave(Coalesced& coalesced) noexcept {
  try {
    const auto collectives = coalesced.collectives;
    const bool any = !collectives.empty() || !coalesced.messages.empty() || coalesced.call.delivers();
    const auto work = any ? finish(coalesced) : nullptr;
    for (const auto& each : collectives)
      communicator_->wait(each, raise_pending_signal, at_most(::c10d::kUnsetTimeout));
    undelivered_->deliver_ended();
  } catch (...) {  // the group has failed
    postpone_python_error();
  }
}

TorchBackend::TorchWorkPtr TorchBackend::finish(Coalesced& coalesced) {
  const uint64_t number = sequence_.load(std::memory_order_relaxed);
  constexpr auto kType = ::c10d::OpType::COALESCED;
  if (!coalesced.call.device().is_cpu()) {
    const c10::Stream stream = stream_aside(coalesced.call);
    return finish_on_device(std::move(coalesced.call), stream, kType, number);
  }
  auto works = std::move(coalesced.collectives);
  std::move(coalesced.messages.begin(), coalesced.messages.end(), std::back_inserter(works));
  TorchWork::Origin origin{communicator_, messages_, kType, number, at_most(::c10d::kUnsetTimeout)};
  return make_work(std::move(origin), std::move(coalesced.call), std::move(works));
}

}  // namespace syncengine
