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

ProxyPiece all_reduce(size_t begin, size_t bytes) {
  const std::vector<Copy> copies{{begin, 0, bytes}};
  return {.in = copies, .out = copies, .input_bytes = bytes, .output_bytes = bytes};
}

ProxyPiece broadcast(size_t begin, size_t bytes, bool is_root) {
  ProxyPiece piece = all_reduce(begin, bytes);
  (is_root ? piece.out : piece.in).clear();
  return piece;
}

// The piece with [begin, begin + bytes) of every rank's block.
ProxyPiece reduce_scatter(size_t block, size_t begin, size_t bytes, size_t world) {
  ProxyPiece piece{.out = {{begin, world * bytes, bytes}}};
  for (size_t rank = 0; rank < world; ++rank) piece.in.push_back({rank * block + begin, rank * bytes, bytes});
  piece.input_bytes = piece.output = world * bytes;
  piece.output_bytes = bytes;
  return piece;
}

ProxyPiece all_gather(size_t block, size_t begin, size_t bytes, size_t world) {
  ProxyPiece piece{.in = {{begin, 0, bytes}}};
  for (size_t rank = 0; rank < world; ++rank) piece.out.push_back({rank * block + begin, (rank + 1) * bytes, bytes});
  piece.input_bytes = piece.output = bytes;
  piece.output_bytes = world * bytes;
  return piece;
}

// The piece with the same part of each of the ring's slices, side by side. The piece is a ring of its own, summed in
// the same orders. Past the end of a slice, it holds whatever its memory held before.
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
  const bool whole_blocks =
      operation.collective == Collective::AllReduce || operation.collective == Collective::Broadcast;
  size_t block = operation.collective == Collective::Barrier ? 0 : block_bytes(operation);
  size_t most = round_down(whole_blocks ? slot_bytes : slot_bytes / (ranks + 1), kGrain);
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
    else if (operation.collective == Collective::ReduceScatter)
      pieces.push_back(reduce_scatter(block, begin, bytes, ranks));
    else if (operation.collective == Collective::AllGather)
      pieces.push_back(all_gather(block, begin, bytes, ranks));
    else if (operation.collective == Collective::Broadcast)
      pieces.push_back(broadcast(begin, bytes, rank == operation.root));
    else
      pieces.push_back(all_reduce(begin, bytes));
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
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !posted_.empty() || !started_.empty() || stopping_; });
    if (posted_.empty() && started_.empty()) return;
    auto posted = std::exchange(posted_, {});
    lock.unlock();
    for (auto& next : posted) start(std::move(next));
    finish_oldest();
    lock.lock();
  }
}

void Proxy::start(std::shared_ptr<const Posted> posted) {
  std::shared_ptr<Work> work;
  succeeds([&] { work = own_->submit(posted->operation); });
  started_.push_back({std::move(posted), std::move(work)});
}

void Proxy::finish_oldest() {
  const auto [posted, work] = std::move(started_.front());
  started_.pop_front();
  end(*posted, work && succeeds([&] { own_->wait(work, [this] { parent_->throw_if_failed(); }); }));
}

// Runs a step. An error of it fails the parent on all ranks, so that whoever waits for the parent is told.
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
