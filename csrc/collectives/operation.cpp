#include "collectives/operation.h"

#include "base/error.h"

namespace syncengine {

const char* name(Collective collective) {
  switch (collective) {
    case Collective::AllReduce: return "all_reduce";
    case Collective::Broadcast: return "broadcast";
    case Collective::ReduceScatter: return "reduce_scatter";
    case Collective::AllGather: return "all_gather";
    case Collective::Barrier: return "barrier";
  }
  return "unknown";
}

const char* name(ByMessages what) {
  switch (what) {
    case ByMessages::Nothing: return "barrier";
    case ByMessages::Gather: return "gather";
    case ByMessages::Scatter: return "scatter";
    case ByMessages::AllToAll: return "all_to_all";
  }
  return "barrier";  // one with a hash of its tensor's layout
}

const char* name(Numerics numerics) {
  switch (numerics) {
    case Numerics::RankOrder: return "rank_order";
    case Numerics::Ring: return "ring";
    case Numerics::Fast: return "fast";
    case Numerics::Tree: return "tree";
  }
  return "unknown";
}

void require_supported(const Operation& operation) {
  if (operation.flag_words > kMaxFlagWords)
    throw Error(ErrorKind::InvalidUsage, "at most " + std::to_string(64 * kMaxFlagWords) + " flags fit an operation");
  bool reduces = operation.collective == Collective::AllReduce || operation.collective == Collective::ReduceScatter;
  if (!reduces || is_supported(operation.dtype, operation.op)) return;
  throw Error(ErrorKind::InvalidUsage,
              std::string(name(operation.collective)) + ": op '" + name(operation.op) + "' has no meaning for dtype " +
                  name(operation.dtype) +
                  (operation.dtype == DType::Bool ? "; use 'max' or 'min', or convert it to a float dtype"
                                                  : "; use 'sum' and divide"));
}

}  // namespace syncengine
