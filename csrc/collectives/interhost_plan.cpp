#include "collectives/interhost_plan.h"

#include <set>

#include "collectives/plan.h"

namespace syncengine {

namespace {

// Plans one cell of a reduction; `handlers` are its ranks, by host.
class ReductionPlanner {
 public:
  ReductionPlanner(const Placement& placement, uint32_t cell, int home, std::vector<int> handlers, bool distributes)
      : placement_(placement), cell_(cell), home_(home), handlers_(std::move(handlers)), distributes_(distributes) {}

  std::vector<InterhostStep> steps(Way way) const {
    if (way == Way::Chain) return chain();
    return placement_.host == home_ ? at_home(way) : elsewhere(way);
  }

 private:
  int me() const { return placement_.host; }
  Envelope raw(int peer, int rank) const { return {peer, Content::Raw, rank, id(rank)}; }
  Envelope partial(int peer) const { return {peer, Content::Partial, -1, id(placement_.size)}; }
  Envelope result(int peer) const { return {peer, Content::Result, -1, id(placement_.size + 1)}; }
  uint32_t id(int what) const {
    return cell_ * static_cast<uint32_t>(placement_.size + 2) + static_cast<uint32_t>(what);
  }
  std::vector<InterhostStep::FoldSource> own_sources() const {
    std::vector<InterhostStep::FoldSource> sources;
    for (int rank : placement_.locals()) sources.push_back({rank, -1});
    return sources;
  }

  std::vector<InterhostStep> at_home(Way way) const {
    InterhostStep step{.staged = true, .act = Act::FoldResult};
    auto receive = [&](const Envelope& envelope) {
      step.receives.push_back(envelope);
      step.fold.push_back({-1, static_cast<int>(step.receives.size()) - 1});
    };
    if (way == Way::Exchange) {
      for (int rank = 0; rank < placement_.size; ++rank) {
        if (placement_.host_of[rank] == home_)
          step.fold.push_back({rank, -1});
        else
          receive(raw(handlers_[placement_.host_of[rank]], rank));
      }
    } else {
      for (int host = 0; host < placement_.hosts(); ++host) {
        if (host != home_) {
          receive(partial(handlers_[host]));
        } else {
          for (auto source : own_sources()) step.fold.push_back(source);
        }
      }
    }
    for (int host = 0; host < placement_.hosts() && distributes_; ++host)
      if (host != home_) step.sends.push_back(result(handlers_[host]));
    return {step};
  }

  std::vector<InterhostStep> elsewhere(Way way) const {
    InterhostStep step{.staged = true};
    if (way == Way::Exchange) {
      for (int rank : placement_.locals()) step.sends.push_back(raw(handlers_[home_], rank));
    } else {
      step.act = Act::FoldPartial;
      step.fold = own_sources();
      step.sends = {partial(handlers_[home_])};
    }
    if (!distributes_) return {step};
    return {step, {.receives = {result(handlers_[home_])}, .act = Act::Spread}};
  }

  // The running sum goes through the hosts in their order, which is the order of ranks only if the placement is
  // contiguous.
  std::vector<InterhostStep> chain() const {
    int last = placement_.hosts() - 1;
    InterhostStep forth{.staged = true, .act = me() == last ? Act::FoldResult : Act::FoldPartial};
    if (me() > 0) {
      forth.receives = {partial(handlers_[me() - 1])};
      forth.fold = {{-1, 0}};
    }
    for (auto source : own_sources()) forth.fold.push_back(source);
    if (me() == last) {
      forth.sends = {result(handlers_[last - 1])};
      return {forth};
    }
    forth.sends = {partial(handlers_[me() + 1])};
    InterhostStep back{.receives = {result(handlers_[me() + 1])}, .act = Act::Spread};
    if (me() > 0) back.sends = {result(handlers_[me() - 1])};
    return {forth, back};
  }

  const Placement& placement_;
  uint32_t cell_;
  int home_;
  std::vector<int> handlers_;
  bool distributes_;
};

std::vector<int> stripe_handlers(const Placement& placement, int stripe) {
  std::vector<int> handlers;
  for (int host = 0; host < placement.hosts(); ++host) handlers.push_back(placement.handler(host, stripe));
  return handlers;
}

void plan_all_reduce(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells) {
  bool chain = chunk.way == Way::Chain;
  int homes = chain ? 1 : placement.hosts();
  for (int stripe = 0; stripe < placement.stripes; ++stripe) {
    if (placement.handler(placement.host, stripe) != placement.rank) continue;
    auto [begin, end] = slice(chunk.length, placement.stripes, stripe);
    for (int part = 0; part < homes; ++part) {
      auto [first, past] = slice(end - begin, homes, part);
      if (first == past) continue;
      ReductionPlanner reduction(placement, stripe * homes + part, part, stripe_handlers(placement, stripe), true);
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
    ReductionPlanner reduction(placement, destination, placement.host_of[destination], handlers, false);
    cells.push_back({.slot = destination * chunk.length,
                     .input = destination * chunk.block + chunk.begin,
                     .output = chunk.begin,
                     .bytes = chunk.length,
                     .steps = reduction.steps(chunk.way)});
  }
}

// Plans an all-gather: each part goes from its rank to one rank of every other host, which fetches it for all of them.
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

std::pair<size_t, size_t> stripes_of(const Placement& placement, size_t length, int rank) {
  int host = placement.host_of[rank], first = placement.stripes, last = -1;
  for (int stripe = 0; stripe < placement.stripes; ++stripe) {
    if (placement.handler(host, stripe) != rank) continue;
    first = std::min(first, stripe);
    last = stripe;
  }
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
    for (int destination = 0; destination < placement.size; ++destination) {
      int here = part_handler(placement, placement.host, destination);
      int there = part_handler(placement, host, destination);
      if (here == placement.rank) ranks.insert(there);
    }
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
      bool at_root = placement.host_of[chunk.root] == placement.host;
      if (direct || alone) {
        plan.peers_read_user = at_root && direct && !alone;
        if (at_root && chunk.rank != chunk.root)
          plan.pull.push_back({placement.local_index(chunk.root), chunk.begin, chunk.begin, chunk.length});
        return;
      }
      if (chunk.rank == chunk.root)
        plan.stage.push_back({chunk.begin, 0, chunk.length});
      else if (at_root)
        plan.pull.push_back({placement.local_index(chunk.root), 0, chunk.begin, chunk.length});
      else
        others([&](size_t begin, size_t bytes) { plan.pull.push_back({own, begin, chunk.begin + begin, bytes}); });
      return;
    }
    case Collective::Barrier: return;
  }
}

}  // namespace syncengine
