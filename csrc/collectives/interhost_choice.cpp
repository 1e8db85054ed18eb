#include "collectives/interhost_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "transport/interhost.h"

namespace syncengine {

namespace {

bool is_half(const Operation& operation) {
  return operation.dtype == DType::Float16 || operation.dtype == DType::BFloat16;
}

// Seconds for `bytes` over links of one speed: hops, the bytes of the host that sends most, and the transfers of its
// busiest rank. Chunks follow each other, so only the first one's way through all hops counts in full.
class Cost {
 public:
  Cost(const Placement& placement, const LinkSpeed& speed, size_t chunk_bytes)
      : speed_(speed), hosts_(placement.hosts()), ranks_(placement.stripes), chunk_(static_cast<double>(chunk_bytes)) {}

  double exchange(double bytes) const {
    return 2 * speed_.latency + (ranks_ + 1) * (hosts_ - 1) / hosts_ * bytes / speed_.bandwidth +
           chunks(bytes) * (ranks_ + 1) * (hosts_ - 1) * speed_.overhead;
  }
  // `partial`: bytes of the running sum for each byte of the tensor.
  double chain(double bytes, double partial) const {
    double most = hosts_ == 2 ? partial : partial + 1;
    double chunk = std::min(chunk_, static_cast<double>(Interhost::kMaxTransfer) / partial);
    double first = std::min(bytes, chunk);
    return (hosts_ - 1) * (2 * speed_.latency + (partial + 1) * first / speed_.bandwidth) +
           most * (bytes - first) / speed_.bandwidth + std::ceil(bytes / chunk) * 2 * speed_.overhead;
  }
  double broadcast(double bytes) const {
    return speed_.latency + (hosts_ - 1) * (bytes / speed_.bandwidth + chunks(bytes) * speed_.overhead);
  }
  double relay(double bytes) const {
    return (hosts_ - 1) * (speed_.latency + first(bytes) / speed_.bandwidth) +
           (bytes - first(bytes)) / speed_.bandwidth + chunks(bytes) * speed_.overhead;
  }

 private:
  double first(double bytes) const { return std::min(bytes, chunk_); }
  double chunks(double bytes) const { return std::ceil(bytes / chunk_); }

  LinkSpeed speed_;
  double hosts_, ranks_, chunk_;
};

// The least power of two from which on `other` is quicker than `usual`, for all sizes.
template <class Usual, class Other>
size_t quicker_from(const Usual& usual, const Other& other) {
  size_t from = InterhostChoice::kNever;
  for (size_t bytes = size_t{1} << 40; bytes >= 1 << 10; bytes /= 2) {
    if (other(static_cast<double>(bytes)) >= usual(static_cast<double>(bytes))) break;
    from = bytes;
  }
  return from;
}

// What a host's link moves in about a millisecond, of each of a chunk's cells the same. With few bytes under way, no
// peer gets far ahead of the others, so the link stays full until the end; where the latency is high, more has to be.
size_t cell_bytes(const LinkSpeed& speed, int hosts) {
  double bytes = speed.bandwidth * (1e-3 + speed.latency) / hosts;
  size_t cell = InterhostChoice::kMostCell;
  while (cell > InterhostChoice::kLeastCell && static_cast<double>(cell) > bytes) cell /= 2;
  return cell;
}

std::string size_text(size_t bytes) {
  if (bytes == InterhostChoice::kNever) return "never";
  return bytes < 1024 ? "always" : "from " + std::to_string(bytes >> 10) + " KiB";
}

}  // namespace

InterhostChoice choose_interhost(const Placement& placement, HostAlgorithm algorithm, const LinkSpeed& speed,
                                 size_t chunk_bytes) {
  InterhostChoice choice;
  if (algorithm == HostAlgorithm::Exchange) return choice;
  bool always = algorithm == HostAlgorithm::Chain;
  if (placement.hosts() > 2) choice.cell = cell_bytes(speed, placement.hosts());
  Cost cost(placement, speed, chunk_bytes);
  auto exchange = [&](double bytes) { return cost.exchange(bytes); };
  if (placement.contiguous) {
    choice.chain = always ? 0 : quicker_from(exchange, [&](double bytes) { return cost.chain(bytes, 1); });
    choice.chain_half = always ? 0 : quicker_from(exchange, [&](double bytes) { return cost.chain(bytes, 2); });
  }
  if (placement.hosts() > 2) {
    choice.relay = always ? 0
                          : quicker_from([&](double bytes) { return cost.broadcast(bytes); },
                                         [&](double bytes) { return cost.relay(bytes); });
  }
  return choice;
}

bool speed_matters(const Placement& placement) {
  return placement.hosts() > 2 || (placement.stripes > 1 && placement.contiguous);
}

Way choose_way(const InterhostChoice& choice, const Operation& operation) {
  if (operation.numerics == Numerics::Ring) return Way::Exchange;
  if (operation.numerics == Numerics::Fast) return Way::Sums;
  size_t from = is_half(operation) ? choice.chain_half : choice.chain;
  bool chain = operation.collective == Collective::AllReduce && operation.input.bytes() >= from;
  return chain ? Way::Chain : Way::Exchange;
}

Way way_of_tree(const Placement& placement, const std::vector<uint8_t>& merges) {
  if (placement.stripes == 1 || !placement.contiguous) return Way::Exchange;
  for (const auto& ranks : placement.members) {
    int sums = 0;  // of this host alone, on the stack
    for (int rank : ranks) {
      sums += 1 - merges[rank];
      if (sums < 1 && rank != ranks.back()) return Way::Exchange;
    }
    if (sums > 1) return Way::Exchange;
  }
  return Way::Sums;
}

bool relays(const InterhostChoice& choice, const Operation& operation) {
  return operation.input.bytes() >= choice.relay;
}

std::string describe(const InterhostChoice& choice) {
  return "all_reduce by chain " + size_text(choice.chain) + " (16-bit " + size_text(choice.chain_half) +
         "), broadcast by relay " + size_text(choice.relay);
}

std::string describe(const LinkSpeed& speed) {
  char text[96];
  std::snprintf(text, sizeof(text), "%.0f us, %.0f MB/s, %.1f us a transfer", speed.latency * 1e6,
                speed.bandwidth * 1e-6, speed.overhead * 1e6);
  return text;
}

}  // namespace syncengine
