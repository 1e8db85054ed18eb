#include "collectives/interhost_plan.h"

#include <algorithm>

#include "kernels/reduce.h"

namespace syncengine {

namespace {

// The size in bytes from which on the chain is quicker than the exchange. The chain's running sum has `partial` bytes
// for each byte of the tensor.
//
// Counted in chunks sent by the busiest host: n chunks take the exchange n * `exchange`. They take the chain `first`,
// in which the first chunk passes all hosts, and `chain` for each further chunk. All of that takes time in proportion
// to bytes, so the speed of the links cancels out. Latency is not counted: it matters for small tensors, and with more
// than two hosts the chain has more hops.
size_t chain_from(const Placement& placement, double chunk, double partial) {
  const double hosts = placement.hosts(), ranks = placement.stripes;
  const double exchange = (ranks + 1) * (hosts - 1) / hosts, chain = hosts == 2 ? partial : partial + 1;
  const double first = (hosts - 1) * (partial + 1);
  if (!placement.contiguous || exchange <= chain) return InterhostChoice::kNever;
  if (hosts == 2 && first <= exchange) return 0;
  return static_cast<size_t>(chunk * std::max(1.0, (first - chain) / (exchange - chain)));
}

std::string size_text(size_t bytes) {
  if (bytes == InterhostChoice::kNever) return "never";
  return bytes < 1024 ? "always" : "from " + std::to_string(bytes >> 10) + " KiB";
}

}  // namespace

InterhostChoice choose_interhost(const Placement& placement, HostAlgorithm algorithm, size_t chunk_bytes) {
  InterhostChoice choice;
  if (algorithm == HostAlgorithm::Exchange) return choice;
  const bool always = algorithm == HostAlgorithm::Chain;
  const auto chunk = static_cast<double>(chunk_bytes);
  choice.chain = always && placement.contiguous ? 0 : chain_from(placement, chunk, 1);
  choice.chain_half = always && placement.contiguous ? 0 : chain_from(placement, chunk, 2);
  if (placement.hosts() > 2) choice.relay = always ? 0 : 2 * chunk_bytes;
  return choice;
}

Way choose_way(const InterhostChoice& choice, const Operation& operation) {
  if (operation.numerics == Numerics::Ring) return Way::Exchange;
  if (operation.numerics == Numerics::Fast) return Way::Sums;
  size_t from = kernels::is_half(operation.dtype) ? choice.chain_half : choice.chain;
  bool chain = operation.collective == Collective::AllReduce && operation.input.bytes() >= from;
  return chain ? Way::Chain : Way::Exchange;
}

Way way_of_tree(const Placement& placement, const std::vector<uint8_t>& merges) {
  if (placement.stripes == 1 || !placement.contiguous) return Way::Exchange;
  for (const auto& ranks : placement.members) {
    int sums = 0;  // sums of this host's own nodes that are on the stack
    for (int rank : ranks) {
      sums += 1 - merges[rank];
      if (sums < 1 && rank != ranks.back()) return Way::Exchange;
    }
    if (sums > 1) return Way::Exchange;
  }
  return Way::Sums;
}

std::string describe(const InterhostChoice& choice) {
  return "all_reduce by chain " + size_text(choice.chain) + " (16-bit " + size_text(choice.chain_half) +
         "), broadcast by relay " + size_text(choice.relay);
}

}  // namespace syncengine
