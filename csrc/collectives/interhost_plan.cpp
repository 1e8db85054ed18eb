#include "collectives/interhost_plan.h"

#include <algorithm>
#include <set>

#include "kernels/reduce.h"

namespace syncengine {

namespace {

// The size in bytes from which on the chain is quicker than the exchange. `partial`: the bytes of the chain's running
// sum for each byte of the tensor.
//
// The unit of time is that in which a host sends one chunk's bytes. The exchange takes the busiest host `exchange` for
// each chunk. The chain takes `first`, until the first chunk has passed all hosts and come back, and the busiest host
// `chain` for each further chunk. All of that is in proportion to bytes, so the speed of the links cancels out. Latency
// is not counted: it matters for small tensors, and with more than two hosts the chain has more hops.
size_t chain_from(const Placement& placement, size_t chunk_bytes, double partial) {
  const double hosts = placement.hosts(), ranks = placement.stripes;
  const double exchange = (ranks + 1) * (hosts - 1) / hosts, chain = hosts == 2 ? partial : partial + 1;
  const double first = (hosts - 1) * (partial + 1);
  if (!placement.contiguous || exchange <= chain) return InterhostChoice::kNever;
  if (hosts == 2 && first <= exchange) return 0;
  return static_cast<size_t>(chunk_bytes * std::max(1.0, (first - chain) / (exchange - chain)));
}

std::string size_text(size_t bytes) {
  if (bytes == InterhostChoice::kNever) return "never";
  return bytes < 1024 ? "always" : "from " + std::to_string(bytes >> 10) + " KiB";
}

// Plans one cell of a reduction.
struct ReductionPlanner {
  const Placement& placement;
  int cell;
  int home;                          // the host where the contributions meet
  const std::vector<int>& handlers;  // the cell's ranks, by host
  bool distributes;                  // other hosts get the result, too

  std::vector<InterhostStep> steps(Way way) const {
    if (way == Way::Chain) return chain();
    return placement.host == home ? at_home(way) : elsewhere(way);
  }

  Envelope raw(int peer, int rank) const { return {peer, Content::Raw, rank, id(rank)}; }
  Envelope partial(int peer) const { return {peer, Content::Partial, -1, id(placement.size)}; }
  Envelope result(int peer) const { return {peer, Content::Result, -1, id(placement.size + 1)}; }
  uint32_t id(int what) const { return static_cast<uint32_t>(cell * (placement.size + 2) + what); }
  void add_own(InterhostStep& step) const {
    for (int rank : placement.locals()) step.fold.push_back({rank, -1});
  }

  std::vector<InterhostStep> at_home(Way way) const {
    InterhostStep step{.staged = true, .act = Act::FoldResult};
    auto receive = [&](const Envelope& envelope) {
      step.receives.push_back(envelope);
      step.fold.push_back({-1, static_cast<int>(step.receives.size()) - 1});
    };
    if (way == Way::Exchange) {
      for (int rank = 0; rank < placement.size; ++rank) {
        if (placement.host_of[rank] == home)
          step.fold.push_back({rank, -1});
        else
          receive(raw(handlers[placement.host_of[rank]], rank));
      }
    } else {
      for (int host = 0; host < placement.hosts(); ++host) {
        if (host == home)
          add_own(step);
        else
          receive(partial(handlers[host]));
      }
    }
    for (int host = 0; host < placement.hosts() && distributes; ++host)
      if (host != home) step.sends.push_back(result(handlers[host]));
    return {step};
  }

  std::vector<InterhostStep> elsewhere(Way way) const {
    InterhostStep step{.staged = true};
    if (way == Way::Exchange) {
      for (int rank : placement.locals()) step.sends.push_back(raw(handlers[home], rank));
    } else {
      step.act = Act::FoldPartial;
      add_own(step);
      step.sends = {partial(handlers[home])};
    }
    if (!distributes) return {step};
    return {step, {.receives = {result(handlers[home])}, .act = Act::Spread}};
  }

  // The running sum goes through the hosts in their order. In a contiguous placement that is the order of ranks; in any
  // other the chain is never chosen.
  std::vector<InterhostStep> chain() const {
    const int me = placement.host, last = placement.hosts() - 1;
    InterhostStep forth{.staged = true, .act = me == last ? Act::FoldResult : Act::FoldPartial};
    if (me > 0) {
      forth.receives = {partial(handlers[me - 1])};
      forth.fold = {{-1, 0}};
    }
    add_own(forth);
    if (me == last) {
      forth.sends = {result(handlers[last - 1])};
      return {forth};
    }
    forth.sends = {partial(handlers[me + 1])};
    InterhostStep back{.receives = {result(handlers[me + 1])}, .act = Act::Spread};
    if (me > 0) back.sends = {result(handlers[me - 1])};
    return {forth, back};
  }
};

void plan_all_reduce(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells) {
  const int homes = chunk.way == Way::Chain ? 1 : placement.hosts();
  for (int stripe = 0; stripe < placement.stripes; ++stripe) {
    if (placement.handler(placement.host, stripe) != placement.rank) continue;
    std::vector<int> handlers;
    for (int host = 0; host < placement.hosts(); ++host) handlers.push_back(placement.handler(host, stripe));
    auto [begin, end] = slice(chunk.length, placement.stripes, stripe);
    for (int part = 0; part < homes; ++part) {
      auto [first, past] = slice(end - begin, homes, part);
      if (first == past) continue;
      const ReductionPlanner reduction{placement, stripe * homes + part, part, handlers, true};
      cells.push_back({.slot = begin + first,
                       .input = chunk.begin + begin + first,
                       .output = chunk.begin + begin + first,
                       .bytes = past - first,
                       .spreading = Spreading::Peers,
                       .steps = reduction.steps(chunk.way)});
    }
  }
}

void plan_reduce_scatter(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells) {
  if (chunk.length == 0) return;
  for (int destination = 0; destination < placement.size; ++destination) {
    std::vector<int> handlers;
    for (int host = 0; host < placement.hosts(); ++host) handlers.push_back(part_handler(placement, host, destination));
    if (handlers[placement.host] != placement.rank) continue;
    const ReductionPlanner reduction{placement, destination, placement.host_of[destination], handlers, false};
    cells.push_back({.slot = destination * chunk.length,
                     .input = destination * chunk.block + chunk.begin,
                     .output = chunk.begin,
                     .bytes = chunk.length,
                     .steps = reduction.steps(chunk.way)});
  }
}

// Plans an all-gather: each part goes from its rank to one rank of every other host, and from there to its local peers.
void plan_all_gather(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells) {
  if (chunk.length == 0) return;
  for (int source = 0; source < placement.size; ++source) {
    InterhostCell cell{.slot = source * chunk.length,
                       .input = chunk.begin,
                       .output = source * chunk.block + chunk.begin,
                       .bytes = chunk.length};
    uint32_t id = static_cast<uint32_t>(source);
    if (source == placement.rank) {
      InterhostStep step;
      for (int host = 0; host < placement.hosts(); ++host)
        if (host != placement.host)
          step.sends.push_back({part_handler(placement, host, source), Content::Block, source, id});
      cell.steps = {step};
    } else if (placement.host_of[source] != placement.host &&
               part_handler(placement, placement.host, source) == placement.rank) {
      cell.spreading = Spreading::OwnSlot;
      cell.steps = {{.receives = {{source, Content::Block, source, id}}, .act = Act::Spread}};
    } else {
      continue;
    }
    cells.push_back(cell);
  }
}

// Plans a broadcast: on the root's host each handler sends its stripe out of the root's slot or tensor.
void plan_broadcast(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells) {
  int hosts = placement.hosts(), root_host = placement.host_of[chunk.root];
  int behind = (placement.host - root_host + hosts) % hosts;  // how far the own host is behind the root's
  for (int stripe = 0; stripe < placement.stripes; ++stripe) {
    auto [begin, end] = slice(chunk.length, placement.stripes, stripe);
    if (begin == end || placement.handler(placement.host, stripe) != placement.rank) continue;
    auto with = [&](int host, Content content) {
      return Envelope{placement.handler(host % hosts, stripe), content, chunk.root, static_cast<uint32_t>(stripe)};
    };
    InterhostStep step{.staged = true};  // the root's bytes are there, or the peers' slots are free
    if (behind > 0) {
      step.receives = {with(chunk.relay ? placement.host + hosts - 1 : root_host, Content::Block)};
      step.act = Act::Spread;
    }
    Content content = behind == 0 ? Content::Raw : Content::Block;
    if (chunk.relay && behind < hosts - 1) step.sends = {with(placement.host + 1, content)};
    for (int host = 1; host < hosts && !chunk.relay && behind == 0; ++host)
      step.sends.push_back(with(root_host + host, content));
    cells.push_back({.slot = begin,
                     .input = chunk.begin + begin,
                     .output = chunk.begin + begin,
                     .bytes = end - begin,
                     .spreading = behind > 0 ? Spreading::Peers : Spreading::None,
                     .steps = {step}});
  }
}

// Plans a barrier: each host's first rank tells those of all other hosts once all ranks of its own host have arrived.
void plan_barrier(const Placement& placement, std::vector<InterhostCell>& cells) {
  if (placement.locals().front() != placement.rank) return;
  InterhostStep tell{.staged = true}, hear;
  for (int host = 0; host < placement.hosts(); ++host) {
    if (host == placement.host) continue;
    int peer = placement.members[host].front();
    tell.sends.push_back({peer, Content::Block, -1, 0});
    hear.receives.push_back({peer, Content::Block, -1, 0});
  }
  cells.push_back({.steps = {tell}});
  cells.push_back({.steps = {hear}});
}

}  // namespace

InterhostChoice choose_interhost(const Placement& placement, HostAlgorithm algorithm, size_t chunk_bytes) {
  InterhostChoice choice;
  if (algorithm == HostAlgorithm::Exchange) return choice;
  const bool always = algorithm == HostAlgorithm::Chain;
  choice.chain = always && placement.contiguous ? 0 : chain_from(placement, chunk_bytes, 1);
  choice.chain_half = always && placement.contiguous ? 0 : chain_from(placement, chunk_bytes, 2);
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

std::pair<size_t, size_t> stripes_of(const Placement& placement, size_t length, int rank) {
  int host = placement.host_of[rank], first = 0, last = placement.stripes - 1;
  while (placement.handler(host, first) != rank) ++first;
  while (placement.handler(host, last) != rank) --last;
  return {slice(length, placement.stripes, first).first, slice(length, placement.stripes, last).second};
}

int part_handler(const Placement& placement, int host, int destination) {
  if (placement.host_of[destination] == host) return destination;
  const auto& ranks = placement.members[host];
  return ranks[static_cast<size_t>(placement.local_index(destination)) % ranks.size()];
}

std::vector<int> counterparts(const Placement& placement) {
  std::set<int> ranks;
  for (int host = 0; host < placement.hosts(); ++host) {
    if (host == placement.host) continue;
    for (int stripe = 0; stripe < placement.stripes; ++stripe)
      if (placement.handler(placement.host, stripe) == placement.rank) ranks.insert(placement.handler(host, stripe));
    for (int destination = 0; destination < placement.size; ++destination)
      if (part_handler(placement, placement.host, destination) == placement.rank)
        ranks.insert(part_handler(placement, host, destination));
  }
  return {ranks.begin(), ranks.end()};
}

void plan_interhost(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells) {
  cells.clear();
  switch (chunk.collective) {
    case Collective::AllReduce: return plan_all_reduce(placement, chunk, cells);
    case Collective::ReduceScatter: return plan_reduce_scatter(placement, chunk, cells);
    case Collective::AllGather: return plan_all_gather(placement, chunk, cells);
    case Collective::Broadcast: return plan_broadcast(placement, chunk, cells);
    case Collective::Barrier: return plan_barrier(placement, cells);
  }
}

void plan_inside(const Placement& placement, const Chunk& chunk, ChunkPlan& plan) {
  plan.stage.clear();
  plan.pull.clear();
  plan.reduces = plan.pulls = true;
  plan.peers_read_user = false;
  bool direct = chunk.path == Path::Direct, alone = placement.locals().size() == 1;
  auto others = [&](auto&& visit) {
    auto [begin, end] = stripes_of(placement, chunk.length, placement.rank);
    if (begin > 0) visit(0, begin);
    if (end < chunk.length) visit(end, chunk.length - end);
  };
  int own = placement.local_index(placement.rank);
  switch (chunk.collective) {
    case Collective::AllReduce:
      if (chunk.stage_all) {
        plan.stage.push_back({chunk.begin, 0, chunk.length});
      } else if (!direct) {
        others([&](size_t begin, size_t bytes) { plan.stage.push_back({chunk.begin + begin, begin, bytes}); });
      }
      if (!direct && !alone)
        others([&](size_t begin, size_t bytes) { plan.pull.push_back({own, begin, chunk.begin + begin, bytes}); });
      return;
    case Collective::ReduceScatter:
      for (int destination = 0; destination < placement.size && !direct; ++destination) {
        if (part_handler(placement, placement.host, destination) != placement.rank || chunk.stage_all)
          plan.stage.push_back({destination * chunk.block + chunk.begin, destination * chunk.length, chunk.length});
      }
      plan.peers_read_user = direct && !alone;
      return;
    case Collective::AllGather:
      if (!direct) plan.stage.push_back({chunk.begin, chunk.rank * chunk.length, chunk.length});
      for (int source = 0; source < placement.size; ++source) {
        int from = part_handler(placement, placement.host, source);
        if (from == placement.rank && source != placement.rank) continue;  // the envelope came straight into the output
        plan.pull.push_back({placement.local_index(from), direct ? chunk.begin : source * chunk.length,
                             source * chunk.block + chunk.begin, chunk.length});
      }
      return;
    case Collective::Broadcast: {
      const bool is_root = chunk.rank == chunk.root, at_root = placement.host_of[chunk.root] == placement.host;
      plan.peers_read_user = at_root && direct && !alone;
      if (at_root && !is_root)
        plan.pull.push_back({placement.local_index(chunk.root), direct ? chunk.begin : 0, chunk.begin, chunk.length});
      else if (is_root && !direct && !alone)
        plan.stage.push_back({chunk.begin, 0, chunk.length});
      else if (!is_root && !direct)
        others([&](size_t begin, size_t bytes) { plan.pull.push_back({own, begin, chunk.begin + begin, bytes}); });
      return;
    }
    case Collective::Barrier: return;
  }
}

}  // namespace syncengine
