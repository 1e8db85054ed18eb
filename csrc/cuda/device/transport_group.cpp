#include "cuda/device/groups.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/memory.h"
#include "collectives/order.h"
#include "cuda/device/driver.h"
#include "cuda/device/kernels.h"
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

// Copies as few kernels, all with the same gate.
class Copies {
 public:
  Copies(const Gate& gate, cudaStream_t stream) : stream_(stream) { args_.gate = gate; }

  void add(std::byte* to, const std::byte* from, size_t bytes) {
    if (args_.pieces == kMaxRanks) flush();
    args_.destinations[args_.pieces] = to;
    args_.sources[args_.pieces] = from;
    args_.bytes[args_.pieces++] = bytes;
  }
  void flush() {
    if (args_.pieces > 0) launch_copy(args_, kTransportBlocks, stream_);
    args_.pieces = 0;
  }

 private:
  CopyArgs args_{};
  cudaStream_t stream_;
};

}  // namespace

TransportGroup::TransportGroup(std::shared_ptr<Communicator> communicator, std::unique_ptr<DeviceTransport> transport,
                               int device)
    : BaseGroup(std::move(communicator), device),
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
  watchdog_ = std::make_unique<Watchdog>(communicator_, control, [this] { transport_->abort(); });
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
  watchdog_->publish(mark, describe(operation));
  const Gate gate{.words = marks(),
                  .mismatch = control_on_device()->mismatch,
                  .progress = &control_on_device()->progress,
                  .expected = mark,
                  .rank = rank_,
                  .world = world_,
                  .aborted = &control_on_device()->aborted};
  try {
    tell_peers_if_it_fails(*communicator_, [&] { queue(operation, gate, stream); });
  } catch (const Error&) {
    communicator_->throw_if_failed();  // what came first
    throw;
  }
  return "fabric_bytes";
}

void TransportGroup::queue(const Operation& operation, const Gate& gate, cudaStream_t stream) {
  begin(gate, stream);
  if (operation.collective != Collective::Barrier)
    for (const Piece& piece : cut(operation, rank_, world_, kTransportPiece)) {
      stage(operation, piece, stream);
      carry_out(operation, piece, stream);
      deliver(operation, piece, gate, stream);
    }
  end(stream);
}

// Each rank's fingerprint to all of them: no rank's stream goes on before all have come. Where they are not the same it
// stays until the watchdog has ended the transport: no data moves between ranks that mean different sizes.
void TransportGroup::begin(const Gate& gate, cudaStream_t stream) {
  Control* words = control_on_device();
  uint32_t* own = marks() + kMaxSources;
  CUstreamBatchMemOpParams writes[] = {write_word(&words->waiting, gate.expected), write_word(&words->go, 0),
                                       write_word(own, gate.expected), write_word(own + 1, kArrived)};
  check(driver().stream_batch_mem_op(stream, std::size(writes), writes, 0), "queueing a fingerprint");
  auto bytes = [](uint32_t* word) { return reinterpret_cast<std::byte*>(word); };
  transport_->all_gather(bytes(marks()), bytes(own), sizeof(uint32_t));
  Copies copies(gate, stream);
  copies.add(bytes(&words->go), bytes(own + 1), sizeof(uint32_t));
  copies.flush();
  CUstreamBatchMemOpParams wait = wait_for_value(&words->go, kArrived);
  check(driver().stream_batch_mem_op(stream, 1, &wait, 0), "queueing a wait");
}

void TransportGroup::end(cudaStream_t stream) {
  CUstreamBatchMemOpParams write = write_word(&control_on_device()->waiting, 0);
  check(driver().stream_batch_mem_op(stream, 1, &write, 0), "queueing an end");
}

// No peer has had a say in this yet, so there is no gate.
void TransportGroup::stage(const Operation& operation, const Piece& piece, cudaStream_t stream) {
  Copies copies({}, stream);
  for (const Copy& copy : piece.in)
    operation.input.for_each(copy.user, copy.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
      std::byte* to = slot() + copy.slot + offset;
      if (operation.prescale == 1.0) return copies.add(to, memory, bytes);
      ReduceArgs args{.source_count = 1, .destination_count = 1, .scale = operation.prescale};
      args.count = bytes / element_size(operation.dtype);
      args.sources[0] = memory;
      args.destinations[0] = to;
      launch_reduce({.dtype = operation.dtype, .op = ReduceOp::Sum}, args, kTransportBlocks, stream);
    });
  copies.flush();
}

void TransportGroup::carry_out(const Operation& operation, const Piece& piece, cudaStream_t stream) {
  if (piece.input_bytes == 0) return;
  switch (operation.collective) {
    case Collective::AllReduce: {  // each rank reduces a block
      const size_t element = element_size(operation.dtype);
      const size_t block = operation.numerics == Numerics::Ring
                               ? ring_cut(piece.input_bytes, element, world_).chunk
                               : round_up((piece.input_bytes + world_ - 1) / world_, kCacheLine);
      std::byte* own = slot() + rank_ * block;
      transport_->all_to_all(received(), slot(), block);
      reduce(operation, block, own, stream, notes_in(operation, piece, rank_ * block, block));
      transport_->all_gather(slot(), own, block);
      return;
    }
    case Collective::ReduceScatter:
      transport_->all_to_all(received(), slot() + piece.input, piece.output_bytes);
      return reduce(operation, piece.output_bytes, slot() + piece.output, stream, {});
    case Collective::AllGather:
      return transport_->all_gather(slot() + piece.output, slot() + piece.input, piece.input_bytes);
    case Collective::Broadcast: return transport_->broadcast(slot(), piece.input_bytes, operation.root);
    case Collective::Barrier: return;
  }
}

// The only kernels that write the caller's memory. Where anything went wrong they leave nothing that looks like a
// result.
void TransportGroup::deliver(const Operation& operation, const Piece& piece, const Gate& gate, cudaStream_t stream) {
  Copies copies(gate, stream);
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
void TransportGroup::reduce(const Operation& operation, size_t block, std::byte* result, cudaStream_t stream,
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
    launch_reduce({.dtype = operation.dtype, .op = operation.op, .rounding = rounding}, args, kTransportBlocks, stream);
  };
  std::vector<int> order;
  if (operation.numerics == Numerics::Ring) {
    ring_order(rank_, world_, order);
    return add_up(order, result, operation.postscale, kernels::Rounding::EveryHop);
  }
  if (operation.numerics == Numerics::RankOrder) {
    for (int rank = 0; rank < world_; ++rank) order.push_back(rank);
    return add_up(order, result, operation.postscale, kernels::Rounding::Once);
  }
  for (const auto& ranks : hosts_) {  // each host's sum where its first rank's block was
    order.push_back(ranks[0]);
    if (ranks.size() == 1) continue;
    add_up(ranks, received() + ranks[0] * block, 1.0, kernels::Rounding::Once);
    whose[ranks[0]] = -1;
  }
  add_up(order, result, operation.postscale, kernels::Rounding::Once);
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
