// The part of an InterhostLane between staging and pulling: chunks on their way from host to host.
#include <algorithm>

#include "base/error.h"
#include "base/sync_point.h"
#include "engine/hosts/interhost_lane.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

bool InterhostLane::reduce_one() {
  while (!flights_.empty() && flights_.front()->total < pulled_.total) {
    landed_.push_back(std::move(flights_.front()));
    flights_.pop_front();
  }
  start_flights();
  bool moved = false;
  for (auto& flight : flights_) moved |= advance(*flight);
  if (reduced_.total == started_.total) return moved;
  if (!flights_[reduced_.total - flights_.front()->total]->arrived()) return moved;
  step(reduced_, &shm::LaneProgress::reduced, "reduced");
  return true;
}

void InterhostLane::start_flights() {
  for (; started_.total < staged_.total; ++started_.total) {
    const Active& active = at(started_.operation);
    const Operation& operation = active.item.operation;
    if (landed_.empty()) landed_.push_back(std::make_unique<Flight>());
    auto flight = std::move(landed_.back());
    landed_.pop_back();
    flight->operation = started_.operation;
    flight->chunk = started_.chunk;
    flight->total = started_.total;
    size_t block = block_bytes(operation), begin = started_.chunk * active.chunk_bytes;
    plan_interhost(links_.placement,
                   {.collective = operation.collective,
                    .way = choose_way(links_.choice, operation),
                    .root = operation.root,
                    .block = block,
                    .begin = begin,
                    .length = std::min(block - begin, active.chunk_bytes),
                    .relay = relays(links_.choice, operation)},
                   flight->cells);
    flight->progress.assign(flight->cells.size(), {});
    flight->scratch.clear();
    flights_.push_back(std::move(flight));
    if (++started_.chunk == active.chunks) {
      started_.chunk = 0;
      ++started_.operation;
    }
  }
}

bool InterhostLane::advance(Flight& flight) {
  bool moved = false;
  for (size_t cell = 0; cell < flight.cells.size(); ++cell) moved |= advance(flight, cell);
  return moved;
}

bool InterhostLane::advance(Flight& flight, size_t cell) {
  Flight::Progress& progress = flight.progress[cell];
  const auto& steps = flight.cells[cell].steps;
  bool moved = false;
  // All at once (interhost_plan.h says why they may be): later the peer would hear of it behind data, milliseconds on a slow link.
  while (progress.receives.size() < steps.size() && may_receive(flight, cell, steps[progress.receives.size()])) {
    post_receives(flight, cell, steps[progress.receives.size()]);
    moved = true;
  }
  for (; progress.step < steps.size(); moved = true) {
    const InterhostStep& step = steps[progress.step];
    if (progress.acted) {
      if (!all_ended(flight, progress.sends)) return moved;
      ++progress.step;
      progress.acted = false;
      continue;
    }
    bool is_posted = progress.step < progress.receives.size();
    if (!is_posted || !all_ended(flight, progress.receives[progress.step].transfers)) return moved;
    if (!may_send(flight, cell, step)) return moved;
    if (step.staged) {
      if (is_behind(&shm::LaneProgress::staged, flight.total + 1)) return moved;
      verify(flight.operation, at(flight.operation));
    }
    act(flight, cell);
    post_sends(flight, cell);
    progress.acted = true;
    progress.arrived = progress.step + 1 == steps.size();
  }
  return moved;
}

bool InterhostLane::all_ended(const Flight& flight, const Flight::Transfers& transfers) const {
  for (const auto& transfer : transfers) {
    if (!transfer->ended()) return false;
    if (transfer->state() == Interhost::Transfer::State::Failed)
      throw Error(transfer->error().kind(), std::string(transfer->error().what()) + " while " +
                                                links_.name(links_.placement.rank) + " was in " +
                                                describe(at(flight.operation).item.operation));
  }
  return true;
}

// Bytes move between two ranks only if both mean the same operation. What is sent unasked, the receiver takes only then; what
// waits for a receive, the sender sends only then: it hears of the operation with the receive, so nobody waits longer.
bool InterhostLane::may_receive(const Flight& flight, size_t cell, const InterhostStep& step) {
  return std::all_of(step.receives.begin(), step.receives.end(), [&](const Envelope& envelope) {
    return payload_bytes(flight, cell, envelope) > Interhost::kMaxUnasked || agrees(flight.operation, envelope.peer);
  });
}

bool InterhostLane::may_send(const Flight& flight, size_t cell, const InterhostStep& step) {
  return std::all_of(step.sends.begin(), step.sends.end(), [&](const Envelope& envelope) {
    return payload_bytes(flight, cell, envelope) <= Interhost::kMaxUnasked || agrees(flight.operation, envelope.peer);
  });
}

bool InterhostLane::is_wide(const Operation& operation) const {
  bool is_half = operation.dtype == DType::Float16 || operation.dtype == DType::BFloat16;
  return is_half && choose_way(links_.choice, operation) == Way::Chain;
}

InterhostRunner::View InterhostLane::view(const Flight& flight, size_t cell) {
  const Active& active = at(flight.operation);
  point_bases(active, flight.total);
  const Operation& operation = active.item.operation;
  return {
      operation,         flight.cells[cell], runner_.bases(), active.path == Path::Direct, operation.prescale != 1.0,
      is_wide(operation)};
}

size_t InterhostLane::payload_bytes(const Flight& flight, size_t cell, const Envelope& envelope) const {
  size_t bytes = flight.cells[cell].bytes;
  return envelope.content == Content::Partial && is_wide(at(flight.operation).item.operation) ? bytes * 2 : bytes;
}

void InterhostLane::post_receives(Flight& flight, size_t cell, const InterhostStep& step) {
  auto& receives = flight.progress[cell].receives.emplace_back();
  if (step.receives.empty()) return;
  auto where = view(flight, cell);
  for (const Envelope& envelope : step.receives) {
    bool into_output = envelope.content == Content::Result || envelope.content == Content::Block;
    size_t bytes = payload_bytes(flight, cell, envelope);
    std::byte* target = into_output ? interhost_runner_.output(where) : nullptr;
    bool in_place = target != nullptr;
    if (!in_place) target = flight.scratch.take(bytes);
    receives.places.push_back(in_place ? nullptr : target);
    receives.transfers.push_back(links_.receive(envelope.peer, tag(flight, envelope, bytes), target, bytes));
  }
}

void InterhostLane::act(Flight& flight, size_t cell) {
  auto& progress = flight.progress[cell];
  const InterhostStep& step = flight.cells[cell].steps[progress.step];
  if (step.act == Act::Nothing) return;
  auto where = view(flight, cell);
  const auto& received = progress.receives[progress.step].places;
  moved_bytes_ += where.cell.bytes;
  sync_point("reducing");
  switch (step.act) {
    case Act::Nothing: return;
    case Act::FoldPartial:
      progress.partial = flight.scratch.take(InterhostRunner::partial_bytes(where));
      return interhost_runner_.fold_partial(where, step, received, progress.partial);
    case Act::FoldResult: return interhost_runner_.fold_result(where, step, received);
    case Act::Spread: return interhost_runner_.spread(where, received[0]);
  }
}

void InterhostLane::post_sends(Flight& flight, size_t cell) {
  auto& progress = flight.progress[cell];
  const InterhostStep& step = flight.cells[cell].steps[progress.step];
  progress.sends.clear();
  if (step.sends.empty()) return;
  auto where = view(flight, cell);
  const std::byte* gathered = nullptr;  // the own output or input, where it is in pieces
  for (const Envelope& envelope : step.sends) {
    size_t bytes = payload_bytes(flight, cell, envelope);
    const std::byte* source = nullptr;
    if (envelope.content == Content::Partial) {
      source = progress.partial;
    } else if (envelope.content == Content::Result) {
      source = interhost_runner_.output(where);
      if (!source && !gathered) {
        std::byte* copy = flight.scratch.take(bytes);
        interhost_runner_.gather_output(where, copy);
        gathered = copy;
      }
    } else {
      int rank = envelope.content == Content::Raw ? envelope.rank : links_.placement.rank;
      source = interhost_runner_.contribution(where, rank);
      if (!source && bytes > 0) {
        std::byte* copy = flight.scratch.take(bytes);
        interhost_runner_.gather_contribution(where, rank, copy);
        source = copy;
      }
    }
    if (!source) source = gathered;
    counters_.interhost_bytes += bytes;
    progress.sends.push_back(links_.send(envelope.peer, tag(flight, envelope, bytes), source, bytes));
  }
}

}  // namespace syncengine::hosts
