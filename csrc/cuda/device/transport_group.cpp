#include "cuda/device/groups.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/memory.h"
#include "collectives/order.h"
#include "cuda/device/driver.h"
#include "cuda/device/stream_steps.h"
#include "cuda/sequence.h"
#include "transport/shm/layout.h"

namespace syncengine::cuda {

namespace {

static_assert(kMaxSources >= shm::kMaxLocalRanks);  // which a job on several hosts keeps to as well

// So large that starting a piece's collectives costs little beside its bytes. Not measured on a GPU.
constexpr size_t kTransportPiece = 16 << 20;
constexpr size_t kTransportSlot = kTransportPiece + (64 << 10);  // an all-reduce's blocks are rounded up
constexpr size_t kMarkBytes = 2 * kMaxSources * sizeof(uint32_t);
constexpr int kTransportBlocks = 16;        // as on one host
constexpr uint32_t kConnecting = kArrived;  // no fingerprint: these have more bits

std::vector<std::vector<int>> ranks_by_host(const std::vector<int>& hosts) {
  std::vector<std::vector<int>> ranks(*std::max_element(hosts.begin(), hosts.end()) + 1);
  for (size_t rank = 0; rank < hosts.size(); ++rank) ranks[hosts[rank]].push_back(static_cast<int>(rank));
  return ranks;
}

}  // namespace

TransportGroup::TransportGroup(std::shared_ptr<Communicator> communicator, std::unique_ptr<DeviceTransport> transport,
                               int device)
    : DeviceGroup(std::move(communicator), device),
      transport_(std::move(transport)),
      rank_(communicator_->rank()),
      world_(communicator_->size()),
      hosts_(ranks_by_host(communicator_->hosts())) {
  const UseDevice use(device_);
  Control* control = nullptr;
  tell_peers_if_it_fails(*communicator_, [&] {
    load_kernels();
    control_.emplace(sizeof(Control));
    control = new (control_->data()) Control{};
    staging_ = std::make_unique<DeviceMemory>(2 * kTransportSlot + kMarkBytes);
  });
  std::vector<Control*> words(world_);
  words[rank_] = control;
  watchdog_ = std::make_unique<Watchdog>(communicator_, std::move(words), [this] { transport_->abort(); });
  watchdog_->publish(kConnecting, "connecting devices");
  store(control->waiting, kConnecting);
  try {
    tell_peers_if_it_fails(*communicator_, [&] { transport_->connect(); });
    communicator_->throw_if_failed();
  } catch (...) {
    transport_->abort();
    communicator_->throw_if_failed();  // what came first
    throw;
  }
  store(control->waiting, 0);
}

std::byte* TransportGroup::received() const { return slot() + kTransportSlot; }
uint32_t* TransportGroup::marks() const { return reinterpret_cast<uint32_t*>(received() + kTransportSlot); }

const char* TransportGroup::enqueue(const Operation& operation, cudaStream_t stream) {
  const uint32_t mark = fingerprint(operation, Path::Staged, 0);
  watchdog_->publish(mark, call_text(operation));
  const Gate gate{.words = marks(), .control = control_on_device(), .expected = mark, .rank = rank_, .world = world_};
  try {
    tell_peers_if_it_fails(*communicator_, [&] { queue(operation, gate, stream); });
  } catch (const Error&) {
    communicator_->throw_if_failed();  // what came first
    throw;
  }
  return "fabric_bytes";
}

void TransportGroup::queue(const Operation& operation, const Gate& gate, cudaStream_t stream) {
  StreamSteps steps(stream, kTransportBlocks);
  begin(gate, steps, stream);
  for (const Piece& piece : cut(operation, rank_, world_, kTransportPiece)) {
    stage(operation, piece.in, slot(), steps);
    carry_out(operation, piece, steps);
    deliver(operation, piece, gate, steps);
  }
  CUstreamBatchMemOpParams end = write_word(&control_on_device()->waiting, 0);
  check(driver().stream_batch_mem_op(stream, 1, &end, 0), "queueing an end");
}

// Each rank's fingerprint to all of them: no rank's stream goes on before all have come. Where they are not the same it
// stays until the watchdog has ended the transport: no data moves between ranks that mean different sizes.
void TransportGroup::begin(const Gate& gate, Steps& steps, cudaStream_t stream) {
  Control* words = control_on_device();
  uint32_t* own = marks() + kMaxSources;
  CUstreamBatchMemOpParams writes[] = {write_word(&words->waiting, gate.expected), write_word(&words->go, 0),
                                       write_word(own, gate.expected), write_word(own + 1, kArrived)};
  check(driver().stream_batch_mem_op(stream, std::size(writes), writes, 0), "queueing a fingerprint");
  transport_->all_gather(reinterpret_cast<std::byte*>(marks()), reinterpret_cast<std::byte*>(own), sizeof(uint32_t));
  Copies copies(steps, gate);
  copies.add(&words->go, own + 1, sizeof(uint32_t));
  copies.flush();
  CUstreamBatchMemOpParams wait = wait_for_value(&words->go, kArrived);
  check(driver().stream_batch_mem_op(stream, 1, &wait, 0), "queueing a wait");
}

void TransportGroup::carry_out(const Operation& operation, const Piece& piece, Steps& steps) {
  if (piece.input_bytes == 0) return;
  switch (operation.collective) {
    case Collective::AllReduce: {  // each rank reduces a block
      const size_t element = element_size(operation.dtype);
      const size_t block = operation.numerics == Numerics::Ring
                               ? ring_cut(piece.input_bytes, element, world_).chunk
                               : round_up((piece.input_bytes + world_ - 1) / world_, kCacheLine);
      std::byte* own = slot() + rank_ * block;
      transport_->all_to_all(received(), slot(), block);
      reduce(operation, block, own, steps, notes_in(operation, piece, rank_ * block, block));
      transport_->all_gather(slot(), own, block);
      return;
    }
    case Collective::ReduceScatter:
      transport_->all_to_all(received(), slot() + piece.input, piece.output_bytes);
      return reduce(operation, piece.output_bytes, slot() + piece.output, steps, {});
    case Collective::AllGather:
      return transport_->all_gather(slot() + piece.output, slot() + piece.input, piece.input_bytes);
    case Collective::Broadcast: return transport_->broadcast(slot(), piece.input_bytes, operation.root);
    case Collective::Barrier: return;
  }
}

// The only kernels that write the caller's memory. Where anything went wrong they leave nothing that looks like a
// result.
void TransportGroup::deliver(const Operation& operation, const Piece& piece, const Gate& gate, Steps& steps) {
  Copies copies(steps, gate);
  for (const Copy& copy : piece.out)
    operation.output.for_each(copy.user, copy.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
      copies.add(memory, slot() + copy.slot + offset, bytes);
    });
  copies.flush();
}

// Of `bytes` of the slot: those that anybody has staged.
NoteArgs TransportGroup::notes_in(const Operation& operation, const Piece& piece, size_t begin, size_t bytes) const {
  const Copy* copy = copy_at(piece.in, begin);
  if (!copy) return {};
  const size_t skip = begin - copy->slot;
  return notes_of(operation, world_, copy->user + skip, std::min(bytes, copy->bytes - skip));
}

// Every rank's block of `received` into one.
void TransportGroup::reduce(const Operation& operation, size_t block, std::byte* result, Steps& steps,
                            const NoteArgs& notes) {
  std::vector<int8_t> whose;  // by rank: what lies in its block
  for (int rank = 0; rank < world_; ++rank) whose.push_back(static_cast<int8_t>(rank));
  auto add_up = [&](const std::vector<int>& ranks, std::byte* to, double scale, kernels::Rounding rounding) {
    ReduceArgs args{.source_count = static_cast<int>(ranks.size()), .destination_count = 1, .scale = scale};
    args.count = block / element_size(operation.dtype);
    for (size_t i = 0; i < ranks.size(); ++i) {
      args.sources[i] = received() + ranks[i] * block;
      args.ranks[i] = whose[ranks[i]];
    }
    args.notes = notes;
    args.destinations[0] = to;
    steps.reduce({.dtype = operation.dtype, .op = operation.op, .rounding = rounding}, args);
  };
  const bool ring = operation.numerics == Numerics::Ring;
  std::vector<int> order;
  if (ring) {
    ring_order(rank_, world_, order);
  } else if (operation.numerics == Numerics::RankOrder) {
    for (int rank = 0; rank < world_; ++rank) order.push_back(rank);
  } else {
    for (const auto& ranks : hosts_) {  // each host's sum where its first rank's block was
      order.push_back(ranks[0]);
      if (ranks.size() == 1) continue;
      add_up(ranks, received() + ranks[0] * block, 1.0, kernels::Rounding::Once);
      whose[ranks[0]] = -1;
    }
  }
  add_up(order, result, operation.postscale, ring ? kernels::Rounding::EveryHop : kernels::Rounding::Once);
}

void TransportGroup::release() {
  cudaDeviceSynchronize();  // ends: the watchdog releases what waits for a peer that does not come
  watchdog_->stop();
  try {
    communicator_->check_peers();
  } catch (const Error&) {  // the watchdog may not have looked since
    transport_->abort();
  }
  transport_->close();
  staging_.reset();
}

}  // namespace syncengine::cuda
