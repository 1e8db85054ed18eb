#include "cuda/device/groups.h"

#include <algorithm>
#include <bitset>
#include <cstdlib>
#include <thread>
#include <utility>

#include "base/say.h"
#include "base/sync_point.h"
#include "cuda/device/stream.h"

namespace syncengine::cuda {

namespace {

// For benchmarks of one rank alone, in a build with test hooks: if SYNCENGINE_TEST_FAKE_ARRIVALS is set, a rank gives
// its peers' signals itself, and so never waits. Results are then meaningless.
bool fakes_arrivals() {
  static const bool fakes = has_test_hooks() && std::getenv("SYNCENGINE_TEST_FAKE_ARRIVALS") != nullptr;
  return fakes;
}

// Half of the staging memory: room for one chunk, large since each costs up to two exchanges. Not measured on a GPU.
constexpr size_t kSlotBytes = 16 << 20;
constexpr auto kPatience = std::chrono::seconds(2);

}  // namespace

void DeviceGroup::run(const Operation& operation, void* stream) {
  std::lock_guard lock(mutex_);
  require_open();
  require_supported(operation);
  const UseDevice use(device_);
  const char* way = enqueue(operation, static_cast<cudaStream_t>(stream));
  counters_[way] += operation.input.bytes();
}

std::shared_ptr<void> DeviceGroup::allocate(size_t bytes, const std::function<void()>&) {
  const UseDevice use(device_);
  std::shared_ptr<DeviceMemory> memory;
  tell_peers_if_it_fails(*communicator_, [&] { memory = std::make_shared<DeviceMemory>(std::max<size_t>(bytes, 1)); });
  return {memory, memory->data()};
}

Nonfinite DeviceGroup::words_for_nonfinite() {
  std::lock_guard lock(mutex_);
  const UseDevice use(device_);
  if (!nonfinite_) nonfinite_ = std::make_shared<PinnedMemory>((communicator_->size() + 1) * sizeof(uint64_t));
  return {.words = {nonfinite_, reinterpret_cast<uint64_t*>(nonfinite_->data())},
          .on_device = reinterpret_cast<uint64_t*>(nonfinite_->on_device())};
}

void DeviceGroup::close() {
  std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  const UseDevice use(device_);
  release();
  if (nonfinite_) nonfinite_->unpin();
}

void DeviceGroup::require_open() const {
  if (closed_) throw Error(ErrorKind::InvalidUsage, kClosed);
  throw_if_failed();
}

// An exchange is one call of the driver, and one node of a graph; its operations run in their order. Whoever sees a
// written word also sees all that the stream did before that write (the default of cuStreamWriteValue32).
void StreamSteps::exchange(const WordExchange& exchange) {
  const auto& controls = *controls_;
  Control& own = *controls[rank_];
  std::vector<CUstreamBatchMemOpParams> operations;
  auto for_each_peer = [&](auto&& visit) {
    for (int peer = 0; peer < static_cast<int>(controls.size()); ++peer)
      if (peer != rank_) visit(peer);
  };
  auto reset = [&](int set) {
    for_each_peer([&](int peer) { operations.push_back(write_word(&own.inbox[set][peer], 0)); });
  };
  if (exchange.reset >= 0) reset(exchange.reset);
  operations.push_back(write_word(&own.waiting, exchange.set + 1));
  for_each_peer([&](int peer) {
    auto [to, from] = fakes_arrivals() ? std::pair(rank_, peer) : std::pair(peer, rank_);
    operations.push_back(write_word(&controls[to]->inbox[exchange.set][from], exchange.value));
  });
  for_each_peer([&](int peer) { operations.push_back(wait_for_word(&own.inbox[exchange.set][peer])); });
  if (exchange.last) reset(exchange.set);
  operations.push_back(write_word(&own.waiting, 0));
  check(stream_batch_mem_op()(stream_, static_cast<unsigned>(operations.size()), operations.data(), 0),
        "queueing signals");
}

PeerGroup::PeerGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted)
    : DeviceGroup(std::move(communicator), device) {
  const UseDevice use(device_);
  const int size = communicator_->size();
  Mapping pages = share_pages(*communicator_, size * sizeof(Control), interrupted);
  tell_peers_if_it_fails(*communicator_, [&] {
    load_kernels();
    words_.emplace(std::move(pages));
  });
  std::vector<Control*> words;
  for (int rank = 0; rank < size; ++rank) {
    words.push_back(&words_of(rank));
    controls_.push_back(reinterpret_cast<Control*>(words_->on_device()) + rank);
  }
  site_ = {.rank = communicator_->rank(), .world = size, .control = controls_[communicator_->rank()]};
  site_.slot_bytes = kSlotBytes;
  tell_peers_if_it_fails(*communicator_, [&] { prepare_staging(interrupted); });
  counters_["host_staging"] = host_staging_.has_value();
  watchdog_ = std::make_unique<Watchdog>(communicator_, std::move(words));
}

void PeerGroup::prepare_staging(const std::function<void()>& interrupted) {
  staging_ = std::make_unique<DeviceMemory>(2 * kSlotBytes + sizeof(InKernelArea));
  const auto stream = make_stream();
  std::byte* area = staging_->data() + 2 * kSlotBytes;
  check(cudaMemsetAsync(area, 0, offsetof(InKernelArea, slots), stream.get()), "clearing device memory");
  check(cudaStreamSynchronize(stream.get()), "clearing device memory");  // before a peer is told the address
  peer_staging_ = std::make_unique<PeerMemory>(*communicator_, *staging_, interrupted);
  if (const std::string& why = peer_staging_->unreachable; !why.empty()) {
    if (site_.rank == 0)
      say("syncengine: without peer access CUDA tensors go through pinned host memory: " + why + "\n");
    host_staging_.emplace(share_pages(*communicator_, site_.world * 2 * kSlotBytes, interrupted));
    for (int rank = 0; rank < site_.world; ++rank)
      site_.slots.push_back(host_staging_->on_device() + rank * 2 * kSlotBytes);
    return;
  }
  site_.slots = peer_staging_->bases;
  // A kernel that waits would keep a shared device from the peer that it waits for, until its time slice is over.
  // A test that forces another Algorithm than OneShot gets none of these kernels.
  const Algorithm algorithm = communicator_->options().algorithm;
  if (algorithm != Algorithm::OneShot && (algorithm != Algorithm::Auto || peer_staging_->take_turns)) return;
  if (fakes_arrivals()) return;
  for (std::byte* base : site_.slots) site_.areas.push_back(reinterpret_cast<InKernelArea*>(base + 2 * kSlotBytes));
}

const char* PeerGroup::enqueue(const Operation& operation, cudaStream_t stream) {
  const MemoryRoute route = choose(operation);
  const uint32_t mark = fingerprint(operation, route.path, route.place);
  const char* where = route.path == Path::Direct ? " in memory of syncengine.empty" : "";
  watchdog_->publish(mark, call_text(operation) + where);
  StreamSteps steps(stream, site_.rank, &controls_);
  tell_peers_if_it_fails(*communicator_, [&] { run_sequence(operation, site_, route, mark, steps); });
  const char* const names[] = {"one_shot_bytes", "staged_bytes", "direct_bytes"};
  return names[static_cast<int>(route.path)];
}

MemoryRoute PeerGroup::choose(const Operation& operation) const {
  const Algorithm algorithm = communicator_->options().algorithm;
  const bool by_size = algorithm == Algorithm::Auto;
  for (Path path : {Path::OneShot, Path::Staged})
    if (by_size && fits_one_kernel(operation, site_, {.path = path})) return {.path = path};
  if (algorithm != Algorithm::Staged && algorithm != Algorithm::OneShot && !host_staging_ &&
      operation.prescale == 1.0 && operation.input.bytes() > 0) {
    MemoryRoute direct{.path = Path::Direct, .memories = std::vector<SpanList>(site_.world)};
    const auto& spans = operation.input.spans();
    if (std::ranges::all_of(spans, [&](const Span& span) { return find(span, direct); })) return direct;
  }
  const bool small = algorithm == Algorithm::OneShot || (by_size && operation.input.bytes() <= kOneShotBytes);
  const bool one_shot = small && operation.collective == Collective::AllReduce &&
                        operation.numerics != Numerics::Tree && !fakes_arrivals();
  return {.path = one_shot ? Path::OneShot : Path::Staged};
}

// Appends where `span` lies in each rank's memory to `route`. Returns false if it lies in no Segment of allocate().
bool PeerGroup::find(const Span& span, MemoryRoute& route) const {
  for (const auto& segment : segments_) {
    const std::byte* begin = segment->own->data();
    if (span.data < begin || span.data + span.bytes > begin + segment->own->bytes()) continue;
    const size_t offset = span.data - begin;
    for (int rank = 0; rank < site_.world; ++rank)
      route.memories[rank].add(segment->peers->bases[rank] + offset, span.bytes);
    route.place = (route.place * 31 + segment->number) * 0x100000001b3 + offset;
    return true;
  }
  return false;
}

std::shared_ptr<void> PeerGroup::allocate(size_t bytes, const std::function<void()>& interrupted) {
  std::lock_guard lock(mutex_);
  require_open();
  const UseDevice use(device_);
  const auto segment = std::make_shared<Segment>();
  segment->number = ++segments_so_far_;
  tell_peers_if_it_fails(*communicator_, [&] {
    give_back_dropped(interrupted);
    const auto wanted = gather(*communicator_, static_cast<uint64_t>(bytes), "syncengine.empty on CUDA", interrupted);
    for (int rank = 0; rank < site_.world; ++rank)
      if (wanted[rank] != bytes)
        throw Error(ErrorKind::Mismatch, "syncengine.empty on CUDA: this rank asked for " + std::to_string(bytes) +
                                             " bytes, rank " + std::to_string(communicator_->global_ranks()[rank]) +
                                             " for " + std::to_string(wanted[rank]) +
                                             ": on CUDA all ranks make the same tensors in the same order");
    segment->own = std::make_shared<DeviceMemory>(std::max(bytes, sizeof(ProofArea)));
    if (host_staging_) return;  // it is staged, as other tensors are
    segment->peers = std::make_unique<PeerMemory>(*communicator_, *segment->own, interrupted);
    if (segment->peers->unreachable.empty()) return;
    if (site_.rank == 0) say("syncengine: memory of syncengine.empty is staged: " + segment->peers->unreachable + "\n");
    segment->peers.reset();
    gather(*communicator_, uint8_t{0}, "syncengine.empty on CUDA", interrupted);
    segment->own->unshare();
  });
  std::byte* data = segment->own->data();
  if (!segment->peers) return {segment->own, data};
  segments_.push_back(segment);
  // Release: the tensor's last use comes before.
  return {data, [segment](void*) { segment->dropped.store(true, std::memory_order_release); }};
}

// Peers may be in the middle of an operation on a tensor that this rank has dropped, so memory is freed in two steps,
// both by all ranks: first all of them unmap what every rank has dropped, then the owners free it.
void PeerGroup::give_back_dropped(const std::function<void()>& interrupted) {
  std::bitset<2048> dropped;  // for each of the first segments; later ones wait until earlier ones are gone
  const size_t count = std::min(segments_.size(), dropped.size());
  for (size_t i = 0; i < count; ++i)
    dropped[i] = segments_[i]->dropped.load(std::memory_order_acquire);  // acquire: pairs with the release above
  if (dropped.any()) check(cudaDeviceSynchronize(), "waiting for the device");
  for (const auto& theirs : gather(*communicator_, dropped, "syncengine.empty on CUDA", interrupted)) dropped &= theirs;
  if (dropped.none()) return;
  std::vector<std::shared_ptr<DeviceMemory>> given_back;
  for (size_t i = count; i-- > 0;) {
    if (!dropped[i]) continue;
    segments_[i]->peers.reset();
    given_back.push_back(segments_[i]->own);
    segments_.erase(segments_.begin() + i);
  }
  gather(*communicator_, uint8_t{0}, "syncengine.empty on CUDA", interrupted);
  for (const auto& memory : given_back) memory->unshare();
}

void PeerGroup::release() {
  cudaDeviceSynchronize();  // returns: the watchdog releases waits for peers that do not come
  peer_staging_.reset();
  for (const auto& segment : segments_) segment->peers.reset();
  words_of(site_.rank).gone.store(1, std::memory_order_release);  // release: after the last use of peers' memory
  // Freeing memory that a peer has mapped is undefined. If a peer takes too long, or has died, this memory stays
  // allocated until the process ends. Tensors that the program still holds are not touched.
  const Deadline deadline = Deadline::after(kPatience);
  auto all_gone = [&] {
    for (int rank = 0; rank < site_.world; ++rank)
      if (!words_of(rank).gone.load(std::memory_order_acquire)) return false;  // acquire: pairs with the release above
    return true;
  };
  while (!all_gone() && !deadline.passed() && !watchdog_->has_failed())
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (all_gone()) {
    staging_->unshare();
    for (const auto& segment : segments_) segment->own->unshare();
  }
  segments_.clear();
  watchdog_->stop();
  host_staging_.reset();
  words_.reset();
  staging_.reset();
}

bool is_built() { return true; }

void require_device(int device) {
  stream_batch_mem_op();  // throws without a driver
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting devices");
  if (device < 0 || device >= count)
    throw Error(ErrorKind::InvalidUsage,
                "CUDA: there is no device " + std::to_string(device) + ", only " + std::to_string(count));
}

std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator> communicator, int device,
                                     const std::function<void()>& interrupted) {
  require_device(device);
  if (communicator->spans_hosts()) return std::make_shared<ProxyGroup>(std::move(communicator), device, interrupted);
  if (communicator->size() > kMaxRanks)
    throw Error(ErrorKind::InvalidUsage, "CUDA: at most " + std::to_string(kMaxRanks) +
                                             " ranks a communicator on one host, not " +
                                             std::to_string(communicator->size()));
  return std::make_shared<PeerGroup>(std::move(communicator), device, interrupted);
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace syncengine::cuda
