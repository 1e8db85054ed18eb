// The bytes that the last synchronized backward moved.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace syncengine {

// The reason why a gradient could not be reduced in the memory where autograd left it. Python has them by name.
enum class CopyReason : uint8_t {
  SharedStorage,  // something else holds the memory, and might still read it in this backward
  Layout,         // strides are not the parameter's: ranks would disagree on the order of elements; or a lazy conj()
  Graph,          // part of a graph (create_graph=True)
  Small,          // less than a page, in a bucket that is otherwise reduced in place
  Unused,         // no gradient here: zeros, or what an earlier backward left, stand in
  CommHook,       // a communication hook gets the bucket's gradients in one piece
  Compression,    // what travels is of another dtype
  Bucket,         // on a device buckets are flat
};
inline constexpr std::array kCopyReasons{"shared storage", "layout",    "graph",       "small",
                                         "unused",         "comm hook", "compression", "bucket"};

// The reason why peers do not reach a gradient, or why it could not be reduced where it lies.
enum class StageReason : uint8_t {
  Setting,      // gradient_memory="torch", or an engine without a pool
  Numerics,     // "ring" scales before it adds
  Compression,  // what travels is of another dtype
  Shortage,     // the pool could not grow, and says why
  Elsewhere,    // in memory that autograd did not get from the pool
};
inline constexpr std::array kStageReasons{"setting", "numerics", "compression", "shortage", "elsewhere"};

struct Statistics {
  uint64_t backwards = 0;  // synchronized so far; everything below is about the last one
  uint64_t buckets = 0;
  uint64_t reduced_bytes = 0;
  std::array<uint64_t, kCopyReasons.size()> copied_bytes{};
  std::array<uint64_t, kStageReasons.size()> staged_bytes{};  // of this rank's; a bucket is staged with any of them

  void count_staged(StageReason reason, size_t bytes) { staged_bytes[static_cast<size_t>(reason)] += bytes; }
  void count_copy(CopyReason reason, size_t bytes) { copied_bytes[static_cast<size_t>(reason)] += bytes; }
};

}  // namespace syncengine
