#include "engine/lanes/mismatch.h"

#include "base/error.h"

namespace syncengine {

namespace {

std::string describe_barrier(const shm::OpRecord& record) {
  const auto what = static_cast<ByMessages>(record.layout_hash);
  std::string text = name(what);
  if (record.root != kNoRoot)
    text += std::string(what == ByMessages::Gather ? "(to" : "(from") + " rank " + std::to_string(record.root) +
            " of the group)";
  return text;
}

std::string describe(const shm::OpRecord& record) {
  auto collective = static_cast<Collective>(record.collective);
  auto dtype = static_cast<DType>(record.dtype);
  if (collective == Collective::Barrier) return describe_barrier(record);
  const bool has_root = record.root != kNoRoot, reduces = collective == Collective::AllReduce;
  std::string text = has_root && reduces ? "reduce" : name(collective);
  text += "(";
  if (reduces || collective == Collective::ReduceScatter)
    text += std::string(name(static_cast<ReduceOp>(record.op))) + ", ";
  if (has_root)
    text += (collective == Collective::Broadcast ? "from rank " : "to rank ") + std::to_string(record.root) +
            " of the group, ";
  return text + name(dtype) + ", " + std::to_string(record.bytes / element_size(dtype)) + " elements)";
}

}  // namespace

std::string describe(const Operation& operation) {
  if (operation.describe) return operation.describe();
  shm::OpRecord record{};
  record.collective = static_cast<uint8_t>(operation.collective);
  record.dtype = static_cast<uint8_t>(operation.dtype);
  record.op = static_cast<uint8_t>(operation.op);
  record.root = operation.root;
  record.layout_hash = operation.layout_hash;
  record.bytes = operation.collective == Collective::AllGather ? operation.input.bytes() : operation.output.bytes();
  return describe(record);
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
