// TorchBackend's point-to-point calls, and the collectives that consist of messages (ByMessages): in one call, a rank
// sends at most one message to each other rank.
#include <numeric>

#include "c10d/backend.h"

namespace syncengine {

namespace {

// Channel 0 is the program's. Messages of collectives use channel 1, match by the order of the calls, and say in the
// fingerprint to which call they belong: if one rank refused a call, what another rank sent in it would otherwise be
// taken for a part of the next. The fingerprint includes the dtype, which is the same for all parts of a call.
constexpr uint64_t kCollectives = 1;

std::function<std::string()> describe(const char* call, const char* direction, int peer, int64_t tag) {
  return [=] {
    std::string whom = peer == Message::kAnySource ? "any rank" : "rank " + std::to_string(peer) + " of the group";
    return std::string(call) + "(" + direction + " " + whom + (tag < 0 ? "" : ", tag " + std::to_string(tag)) + ")";
  };
}

// Calls call.write() for a tensor that a message writes, and call.read() for one that a message reads.
at::Tensor place(Call& call, const at::Tensor& tensor, bool writes, SpanList& memory) {
  return writes ? call.write(tensor, memory) : call.read(tensor, memory);
}

Message part_of_collective(const Call& call, ByMessages kind, c10::ScalarType type, bool sends, int peer,
                           SpanList memory) {
  // An empty tensor matches any dtype, since torch.tensor([]) is float32 whatever it stands for.
  const uint64_t of = memory.bytes() == 0 ? 0 : static_cast<uint64_t>(type);
  return {.peer = peer,
          .channel = kCollectives,
          .fingerprint = static_cast<uint64_t>(kind) | of << 8 | call.number << 16,
          .memory = std::move(memory),
          .describe = describe(call.name(), sends ? "to" : "from", peer, -1)};
}

// Bytes of each rank's part, which are equal if no sizes are given.
std::vector<size_t> split_bytes(const char* call, const at::Tensor& tensor, const std::vector<int64_t>& sizes,
                                int world) {
  const int64_t rows = tensor.dim() > 0 ? tensor.size(0) : 1;
  const size_t row_bytes = rows > 0 ? tensor.nbytes() / rows : 0;
  if (sizes.empty()) {
    if (rows % world != 0) refuse(call, rows, " rows don't go into ", world, " equal parts: give split sizes");
    return std::vector<size_t>(world, rows / world * row_bytes);
  }
  const bool negative = std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < 0; });
  const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  if (static_cast<int>(sizes.size()) != world || negative || sum != rows)
    refuse(call, "needs ", world, " split sizes that add up to ", rows, " rows");
  std::vector<size_t> bytes(sizes.begin(), sizes.end());
  for (size_t& part : bytes) part *= row_bytes;
  return bytes;
}

Operation comparison(ByMessages what, int root = kNoRoot) {
  return {.collective = Collective::Barrier, .root = root, .layout_hash = static_cast<uint64_t>(what)};
}

// Adds a gather or scatter: every rank has a tensor, and the root has one for each rank besides, in the only list of
// `lists`.
void add_rooted(Call& call, const TorchBackend& group, ByMessages kind, int root, const TorchBackend::Tensors& tensors,
                const TorchBackend::TensorLists& lists) {
  const bool gathers = kind == ByMessages::Gather;
  const at::Tensor& tensor = require_only(tensors, call.name());
  const c10::ScalarType type = tensor.scalar_type();
  const bool is_root = group.getRank() == root;
  call.add(comparison(kind, root));
  require_lists(call.name(), lists.size(), is_root ? 1 : 0);
  auto add = [&](int peer, bool sends, SpanList memory) {
    call.add({part_of_collective(call, kind, type, sends, peer, std::move(memory)), sends});
  };
  if (!is_root) {
    SpanList memory;
    place(call, tensor, !gathers, memory);
    return add(root, gathers, std::move(memory));
  }
  require_lists(call.name(), lists[0].size(), group.getSize());
  const at::ArrayRef<at::Tensor> one = tensor, all = lists[0];
  call.compare(gathers ? all : one, gathers ? one : all);
  SpanList mine;
  const at::Tensor own = place(call, tensor, !gathers, mine);
  for (int peer = 0; peer < group.getSize(); ++peer) {
    SpanList memory;
    const at::Tensor& part = lists[0][peer];
    require_same_dtype(call.name(), gathers ? part : tensor, gathers ? tensor : part);
    const at::Tensor elements = place(call, part, gathers, memory);
    if (peer != root) {
      add(peer, !gathers, std::move(memory));
      continue;
    }
    if (memory.bytes() != mine.bytes())
      refuse(call.name(), gathers ? "the input is of another size than its place in the outputs"
                                  : "the output is of another size than its place in the inputs");
    const Call::OwnPlace here{own, 0, mine.bytes()}, there{elements, 0, mine.bytes()};
    call.copy_own(gathers ? Call::OwnPart{here, there} : Call::OwnPart{there, here});
  }
}

// Adds an all-to-all. In step n, rank r sends to rank r + n (mod size), so that not all ranks send to the same one.
void add_all_to_all(Call& call, int rank, c10::ScalarType type, const Call::OwnPart& own, std::vector<SpanList> sent,
                    std::vector<SpanList> received) {
  if (own.from.bytes != own.to.bytes)
    refuse(call.name(), "this rank sends itself ", own.from.bytes, " bytes, but has room for ", own.to.bytes);
  call.copy_own(own);
  call.add(comparison(ByMessages::AllToAll));
  const int size = static_cast<int>(sent.size());
  for (int step = 1; step < size; ++step) {
    int to = (rank + step) % size, from = (rank + size - step) % size;
    call.add({part_of_collective(call, ByMessages::AllToAll, type, false, from, std::move(received[from])), false});
    call.add({part_of_collective(call, ByMessages::AllToAll, type, true, to, std::move(sent[to])), true});
  }
}

}  // namespace

TorchWorkPtr TorchBackend::message(const char* name, OpType type, const Tensors& tensors, int peer, int tag) {
  Call call = begin(name, tensors, Counted::Never);
  const bool sends = type == OpType::SEND;
  if (type != OpType::RECVANYSOURCE) require_rank(peer, name);
  Message message{.peer = peer,
                  .tag = static_cast<uint64_t>(static_cast<uint32_t>(tag)),
                  .describe = describe(sends ? "send" : "recv", sends ? "to" : "from", peer, tag)};
  place(call, require_only(tensors, name), !sends, message.memory);
  call.add({std::move(message), sends});
  return start(std::move(call), {type, ::c10d::kUnsetTimeout, true, sends ? Tensors() : tensors});
}

TorchWorkPtr TorchBackend::gather(TensorLists& outputs, Tensors& inputs, const ::c10d::GatherOptions& options) {
  Call call = begin("gather", inputs, Counted::AtOnce);
  const int root = require_rank(options.rootRank, call.name());
  add_rooted(call, *this, ByMessages::Gather, root, inputs, outputs);
  Tensors results = rank_ == root ? outputs[0] : Tensors();
  return start(std::move(call), {OpType::GATHER, options.timeout, options.asyncOp, std::move(results)});
}

TorchWorkPtr TorchBackend::scatter(Tensors& outputs, TensorLists& inputs, const ::c10d::ScatterOptions& options) {
  Call call = begin("scatter", first_of(inputs), Counted::AtOnce);
  add_rooted(call, *this, ByMessages::Scatter, require_rank(options.rootRank, call.name()), outputs, inputs);
  return start(std::move(call), {OpType::SCATTER, options.timeout, options.asyncOp, outputs});
}

TorchWorkPtr TorchBackend::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                                         std::vector<int64_t>& input_sizes, const ::c10d::AllToAllOptions& options) {
  Call call = begin("all_to_all", input, Counted::AtOnce);
  require_same_dtype(call.name(), output, input);
  auto out_bytes = split_bytes(call.name(), output, output_sizes, size_);
  auto in_bytes = split_bytes(call.name(), input, input_sizes, size_);
  call.compare(output, input);
  SpanList whole_input, whole_output;
  const at::Tensor source = call.read(input, whole_input), target = call.write(output, whole_output);
  auto *from = static_cast<std::byte*>(source.data_ptr()), *to = static_cast<std::byte*>(target.data_ptr());
  std::vector<SpanList> sent(size_), received(size_);
  Call::OwnPart own;
  size_t in_offset = 0, out_offset = 0;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) own = {{source, in_offset, in_bytes[peer]}, {target, out_offset, out_bytes[peer]}};
    sent[peer] = {from + in_offset, in_bytes[peer]};
    received[peer] = {to + out_offset, out_bytes[peer]};
    in_offset += in_bytes[peer];
    out_offset += out_bytes[peer];
  }
  add_all_to_all(call, rank_, input.scalar_type(), own, std::move(sent), std::move(received));
  return start(std::move(call), {OpType::ALLTOALL_BASE, options.timeout, options.asyncOp, {output}});
}

TorchWorkPtr TorchBackend::alltoall(Tensors& outputs, Tensors& inputs, const ::c10d::AllToAllOptions& options) {
  Call call = begin("all_to_all", inputs, Counted::AtOnce);
  require_lists(call.name(), outputs.size(), size_);
  require_lists(call.name(), inputs.size(), size_);
  call.compare(outputs, inputs);
  std::vector<SpanList> sent(size_), received(size_);
  Call::OwnPart own;
  for (int peer = 0; peer < size_; ++peer) {
    require_same_dtype(call.name(), inputs[peer], inputs[0]);
    require_same_dtype(call.name(), outputs[peer], inputs[0]);
    const at::Tensor source = call.read(inputs[peer], sent[peer]), target = call.write(outputs[peer], received[peer]);
    if (peer == rank_) own = {{source, 0, sent[peer].bytes()}, {target, 0, received[peer].bytes()}};
  }
  add_all_to_all(call, rank_, inputs[0].scalar_type(), own, std::move(sent), std::move(received));
  return start(std::move(call), {OpType::ALLTOALL, options.timeout, options.asyncOp, outputs});
}

}  // namespace syncengine
