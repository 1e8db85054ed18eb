#include "cuda/proxy.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/memory.h"
#include "base/thread.h"
#include "collectives/order.h"
#include "cuda/control.h"

namespace syncengine::cuda {

namespace {

constexpr size_t kGrain = 64;           // cuts of a ring are rounded to this multiple of two elements of any dtype
constexpr size_t kRingSlice = 2 << 20;  // up to this size, the ring of `world` slices is cut into exactly these

// The piece with [begin, begin + bytes) of the tensor. A broadcast copies in on the root alone, out on the others.
ProxyPiece part_of_tensor(const Operation& operation, int rank, size_t begin, size_t bytes) {
  const std::vector<Copy> copies{{begin, 0, bytes}};
  ProxyPiece piece{.in = copies, .out = copies, .input_bytes = bytes, .output_bytes = bytes};
  if (operation.collective == Collective::Broadcast) (rank == operation.root ? piece.out : piece.in).clear();
  return piece;
}

// The piece with [begin, begin + bytes) of every rank's block, of a reduce-scatter or an all-gather. The slot has all
// blocks' bytes, by rank, and then those of the own block.
ProxyPiece part_of_blocks(bool gathers, size_t block, size_t begin, size_t bytes, size_t world) {
  const size_t all = world * bytes;
  const std::vector<Copy> own{{begin, all, bytes}};
  std::vector<Copy> blocks;
  for (size_t rank = 0; rank < world; ++rank) blocks.push_back({rank * block + begin, rank * bytes, bytes});
  if (gathers) return {.in = own, .out = blocks, .input = all, .input_bytes = bytes, .output_bytes = all};
  return {.in = blocks, .out = own, .input_bytes = all, .output = all, .output_bytes = bytes};
}

// The piece with the same part of each of the ring's slices, side by side: a ring of its own, summed in the same
// orders. Behind the end of a slice it has old bytes of the slot, which are summed, too, but copied to no tensor.
ProxyPiece ring_part(size_t total, size_t slice, size_t begin, size_t bytes, size_t world) {
  ProxyPiece piece{.input_bytes = world * bytes, .output_bytes = world * bytes};
  for (size_t rank = 0; rank < world; ++rank) {
    const size_t from = rank * slice + begin, end = std::min({total, (rank + 1) * slice, from + bytes});
    if (from < end) piece.in.push_back({from, rank * bytes, end - from});
  }
  piece.out = piece.in;
  return piece;
}

}  // namespace

std::vector<ProxyPiece> cut(const Operation& operation, int rank, int world, size_t slot_bytes) {
  const auto ranks = static_cast<size_t>(world);
  const bool gathers = operation.collective == Collective::AllGather;
  const bool by_blocks = gathers || operation.collective == Collective::ReduceScatter;
  size_t block = operation.collective == Collective::Barrier ? 0 : block_bytes(operation);
  size_t most = round_down(by_blocks ? slot_bytes / (ranks + 1) : slot_bytes, kGrain);
  const bool ring =
      operation.collective == Collective::AllReduce && operation.numerics == Numerics::Ring && block > most;
  if (ring) {
    block = ring_cut(operation.input.bytes(), element_size(operation.dtype), world).chunk;
    most = std::min(round_down(slot_bytes / ranks, kGrain), kRingSlice);
  }
  std::vector<ProxyPiece> pieces;
  size_t begin = 0;
  do {
    const size_t bytes = std::min(most, block - begin);
    if (ring)
      pieces.push_back(ring_part(operation.input.bytes(), block, begin, round_up(bytes, kGrain), ranks));
    else if (by_blocks)
      pieces.push_back(part_of_blocks(gathers, block, begin, bytes, ranks));
    else
      pieces.push_back(part_of_tensor(operation, rank, begin, bytes));
    begin += bytes;
  } while (begin < block);
  return pieces;
}

Proxy::Proxy(std::shared_ptr<Communicator> parent, std::shared_ptr<Communicator> own)
    : parent_(std::move(parent)), own_(std::move(own)), thread_(start_thread([this] { run(); })) {}

void Proxy::post(std::shared_ptr<const Posted> posted) {
  {
    std::lock_guard lock(mutex_);
    if (!stopping_) return posted_.push_back(std::move(posted)), changed_.notify_one();
  }
  end(*posted, false);  // a graph was replayed after stop()
}

void Proxy::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (!thread_.joinable()) return;
  thread_.join();
  own_->close();
  own_.reset();  // a graph's callbacks may keep this object longer than communicators should live
  parent_.reset();
}

void Proxy::run() {
  begin_thread("syncengine-cuda");
  // The pieces under way, in the order of posts. One that could not be started has no work.
  std::deque<std::pair<std::shared_ptr<const Posted>, std::shared_ptr<Work>>> started;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !posted_.empty() || !started.empty() || stopping_; });
    if (posted_.empty() && started.empty()) return;
    auto posted = std::exchange(posted_, {});
    lock.unlock();
    for (auto& next : posted) {
      std::shared_ptr<Work> work;
      succeeds([&] { work = own_->submit(next->operation); });
      started.emplace_back(std::move(next), std::move(work));
    }
    const auto& [oldest, work] = started.front();
    end(*oldest, work && succeeds([&] { own_->wait(work, [this] { parent_->throw_if_failed(); }); }));
    started.pop_front();
    lock.lock();
  }
}

// Runs a step; returns whether it threw nothing. An error fails the parent on all ranks, so all who wait for it get it.
template <class Step>
bool Proxy::succeeds(Step&& step) {
  try {
    step();
    return true;
  } catch (const Error& error) {
    parent_->abort(error.kind(), error.what());
  } catch (const std::exception& error) {  // such as std::bad_alloc
    parent_->abort(ErrorKind::Aborted, error.what());
  }
  return false;
}

// Ends a piece. Without a result its output becomes NaN (all bits are ones), as it must not look like a result.
void Proxy::end(const Posted& posted, bool has_result) {
  if (!has_result)
    for (const Span& span : posted.operation.output.spans()) std::memset(span.data, 0xff, span.bytes);
  store(*posted.word, kArrived);
}

}  // namespace syncengine::cuda
