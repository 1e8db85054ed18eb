#include "engine/lanes/mismatch.h"

#include "base/error.h"
#include "collectives/plan.h"

namespace syncengine {

namespace {

std::string describe(const shm::OpRecord& record) {
  const auto collective = static_cast<Collective>(record.collective);
  const auto messages = static_cast<ByMessages>(record.layout_hash);  // of a barrier
  const auto dtype = static_cast<DType>(record.dtype);
  const bool is_barrier = collective == Collective::Barrier, reduces = collective == Collective::AllReduce;
  const bool has_root = record.root != kNoRoot;
  const bool from_root = is_barrier ? messages != ByMessages::Gather : collective == Collective::Broadcast;
  const std::string root = (from_root ? "from rank " : "to rank ") + std::to_string(record.root) + " of the group";
  if (is_barrier) return name(messages) + (has_root ? "(" + root + ")" : "");
  std::string text = has_root && reduces ? "reduce(" : std::string(name(collective)) + "(";
  if (reduces || collective == Collective::ReduceScatter)
    text += std::string(name(static_cast<ReduceOp>(record.op))) + ", ";
  if (has_root) text += root + ", ";
  return text + name(dtype) + ", " + std::to_string(record.bytes / element_size(dtype)) + " elements)";
}

}  // namespace

std::string describe(const Operation& operation) {
  return operation.describe ? operation.describe() : describe(record_of(operation, 0, 0));
}

shm::OpRecord record_of(const Operation& operation, uint64_t key, int64_t spans) {
  return {.key = key,
          .bytes = block_bytes(operation),
          .layout_hash = operation.layout_hash,
          .spans = spans,
          .prescale = operation.prescale,
          .postscale = operation.postscale,
          .root = operation.root,
          .collective = static_cast<uint8_t>(operation.collective),
          .dtype = static_cast<uint8_t>(operation.dtype),
          .op = static_cast<uint8_t>(operation.op),
          .numerics = static_cast<uint8_t>(operation.numerics),
          .flag_words = operation.flag_words};
}

Checked<shm::OpRecord> check(const shm::OpRecord& copy, int rank) {
  auto record = Checked<shm::OpRecord>::sound(copy, [](const shm::OpRecord& it) {
    return it.collective <= static_cast<uint8_t>(Collective::Barrier) &&
           it.dtype <= static_cast<uint8_t>(DType::Bool) && it.op <= static_cast<uint8_t>(ReduceOp::Max) &&
           it.numerics <= static_cast<uint8_t>(Numerics::Tree);
  });
  if (record) return *record;
  throw Error(ErrorKind::PeerLost, "rank " + std::to_string(rank) + " published a call that is none" + kDamaged);
}

void require_same(int me, const Checked<shm::OpRecord>& own, int peer, const Checked<shm::OpRecord>& others,
                  const Operation& operation) {
  const shm::OpRecord &mine = own.get(), &theirs = others.get();
  const bool same = mine.key == theirs.key && mine.bytes == theirs.bytes && mine.layout_hash == theirs.layout_hash &&
                    mine.prescale == theirs.prescale && mine.postscale == theirs.postscale &&
                    mine.root == theirs.root && mine.collective == theirs.collective && mine.dtype == theirs.dtype &&
                    mine.op == theirs.op && mine.numerics == theirs.numerics && mine.flag_words == theirs.flag_words;
  if (same) return;
  std::string here = describe(operation), there = describe(theirs);
  if (describe(mine) == there) there += " with another layout";
  throw Error(ErrorKind::Mismatch, "rank " + std::to_string(me) + " called " + here + " where rank " +
                                       std::to_string(peer) + " called " + there +
                                       ": all ranks must make the same calls in the same order with the same shapes");
}

}  // namespace syncengine
