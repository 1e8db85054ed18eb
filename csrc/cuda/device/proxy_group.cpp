#include "cuda/device/groups.h"

#include <iterator>
#include <numeric>
#include <utility>

#include "base/memory.h"
#include "cuda/device/stream.h"

namespace syncengine::cuda {

namespace {

// A large tensor's pieces travel while others are copied. A piece is small enough that the first and the last copy,
// which nothing hides, take little time, and large enough that its fixed cost does not matter. Not measured on a GPU.
constexpr size_t kPieceBytes = 4 << 20;
constexpr size_t kSlots = 8;

// The argument of a stream's callback. A graph's is never freed, since nobody says when the graph is gone.
struct Submission {
  std::shared_ptr<Proxy> proxy;
  std::shared_ptr<const Proxy::Posted> posted;
  bool captured;
};

void CUDART_CB post(void* data) {
  auto* submission = static_cast<Submission*>(data);
  submission->proxy->post(submission->posted);
  if (!submission->captured) delete submission;
}

// Copies between a tensor and a slot, in one of the two directions.
void transfer(const SpanList& tensor, const std::vector<Copy>& parts, std::byte* slot, cudaMemcpyKind kind,
              cudaStream_t stream) {
  for (const Copy& part : parts)
    tensor.for_each(part.user, part.bytes, [&](std::byte* memory, size_t offset, size_t bytes) {
      std::byte *to = slot + part.slot + offset, *from = memory;
      if (kind == cudaMemcpyHostToDevice) std::swap(to, from);
      check(cudaMemcpyAsync(to, from, bytes, kind, stream), "copying between host and device");
    });
}

// The operation on a piece, for the CPU's engine. Its layout hash covers the whole operation, so that ranks whose whole
// operations differ do not agree on parts of them.
Operation operation_of(const Operation& whole, const ProxyPiece& piece, size_t number, std::byte* memory,
                       const std::shared_ptr<const std::string>& text) {
  Operation operation = whole;
  operation.input = {memory + piece.input, piece.input_bytes};
  operation.output = {memory + piece.output, piece.output_bytes};
  operation.layout_hash = ((whole.layout_hash * 31 + whole.input.bytes()) * 31 + number) * 0x100000001b3;
  operation.describe = [text] { return *text; };
  operation.keepalive = nullptr;
  if (whole.nonfinite) {
    auto nonfinite = std::make_shared<Nonfinite>(*whole.nonfinite);
    nonfinite->parts = piece.in;
    operation.nonfinite = std::move(nonfinite);
  }
  return operation;
}

}  // namespace

ProxyGroup::ProxyGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted)
    : DeviceGroup(std::move(communicator), device) {
  const UseDevice use(device_);
  std::vector<int> everybody(communicator_->size());
  std::iota(everybody.begin(), everybody.end(), 0);
  auto own = communicator_->split(everybody, interrupted);
  tell_peers_if_it_fails(*communicator_, [&] {
    slots_ = std::make_shared<PinnedMemory>(kSlots * (kCacheLine + kPieceBytes));
    check(cudaEventCreateWithFlags(&last_, cudaEventDisableTiming), "making an event");
  });
  proxy_ = std::make_shared<Proxy>(communicator_, std::move(own));
}

const char* ProxyGroup::enqueue(const Operation& operation, cudaStream_t stream) {
  tell_peers_if_it_fails(*communicator_, [&] {
    const auto pieces = cut(operation, communicator_->rank(), communicator_->size(), kPieceBytes);
    const auto text = std::make_shared<const std::string>(call_text(operation));
    const bool captured = is_capturing(stream);
    for (size_t i = 0; i < pieces.size() + kSlots; ++i) {
      const size_t slot = i % kSlots;
      std::byte* data = slots_->data() + kSlots * kCacheLine + slot * kPieceBytes;
      if (i >= kSlots && i - kSlots < pieces.size()) {
        auto* word = reinterpret_cast<uint32_t*>(slots_->on_device() + slot * kCacheLine);
        CUstreamBatchMemOpParams steps[] = {wait_for_word(word), write_word(word, 0)};
        check(stream_batch_mem_op()(stream, std::size(steps), steps, 0), "queueing a wait");
        transfer(operation.output, pieces[i - kSlots].out, data, cudaMemcpyHostToDevice, stream);
      }
      if (i >= pieces.size()) continue;
      transfer(operation.input, pieces[i].in, data, cudaMemcpyDeviceToHost, stream);
      auto* word = reinterpret_cast<uint32_t*>(slots_->data() + slot * kCacheLine);
      auto posted = std::make_shared<Proxy::Posted>(operation_of(operation, pieces[i], i, data, text), word, slots_);
      check(cudaLaunchHostFunc(stream, post, new Submission{proxy_, std::move(posted), captured}),
            "queueing a callback");
    }
    if (!captured) check(cudaEventRecord(last_, stream), "recording an event");
  });
  return "relayed_bytes";
}

void ProxyGroup::release() {
  cudaEventSynchronize(last_);  // returns: every posted piece ends, at the deadline at the latest
  cudaEventDestroy(last_);
  proxy_->stop();
  slots_.reset();
}

}  // namespace syncengine::cuda
