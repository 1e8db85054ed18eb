// Plans of hops between hosts, walked for many placements without a process.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "collectives/interhost_plan.h"
#include "engine/hosts/network.h"
#include "test.h"

namespace syncengine {

namespace {

const char* const kPlacements[] = {"ab",    "abc",      "aab",      "aabb",      "aaab",      "abbb",
                                   "abab",  "abba",     "aaaabbbb", "aabbccdd",  "abcabcabc", "aaaaab",
                                   "aabbb", "abcdefgh", "aaabbc",   "abbcccdddd"};

std::vector<Placement> everybodys(const std::string& hosts) {
  std::vector<int> labels(hosts.begin(), hosts.end());
  std::vector<Placement> placements;
  for (size_t rank = 0; rank < hosts.size(); ++rank) placements.emplace_back(static_cast<int>(rank), labels);
  return placements;
}

// Every envelope that is sent is received by the other side, with the same size, and nothing else is.
void check_envelopes(const std::vector<Placement>& placements, const InterhostChunk& chunk) {
  using Envelopes = std::map<std::tuple<int, int, uint32_t>, std::pair<size_t, bool>>;  // from, to, id: bytes, partial
  Envelopes sent, received;
  for (const Placement& placement : placements) {
    std::vector<InterhostCell> cells;
    plan_interhost(placement, chunk, cells);
    auto known = counterparts(placement);
    auto note = [&](Envelopes& envelopes, int from, int to, const Envelope& envelope, const InterhostCell& cell) {
      const int other = envelope.peer;
      bool partial = envelope.content == Content::Partial;
      CHECK(envelopes.insert({{from, to, envelope.id}, {cell.bytes, partial}}).second);
      CHECK(envelope.id < (uint32_t{1} << hosts::kEnvelopeBits));
      CHECK(placement.host_of[other] != placement.host);
      CHECK(std::count(known.begin(), known.end(), other) == 1);
    };
    for (const InterhostCell& cell : cells)
      for (const InterhostStep& step : cell.steps) {
        for (const Envelope& envelope : step.sends) note(sent, placement.rank, envelope.peer, envelope, cell);
        for (const Envelope& envelope : step.receives) note(received, envelope.peer, placement.rank, envelope, cell);
      }
  }
  CHECK(sent == received);
}

// All ranks' steps, as far as they go.
struct HopsWalk {
  std::vector<std::vector<InterhostCell>> cells;  // by rank
  std::vector<std::vector<size_t>> steps;         // done, by rank and cell
  std::set<std::tuple<int, int, uint32_t>> sent;  // from, to, id

  explicit HopsWalk(const std::vector<Placement>& placements, const InterhostChunk& chunk) {
    for (const Placement& placement : placements) {
      plan_interhost(placement, chunk, cells.emplace_back());
      steps.emplace_back(cells.back().size(), 0);
    }
  }
  // All but the sends of `cell` of `rank` in `step`, which never arrive.
  void run_without(int rank, size_t cell, size_t step) {
    for (bool moved = true; moved;) {
      moved = false;
      for (int at = 0; at < static_cast<int>(cells.size()); ++at) {
        for (size_t i = 0; i < cells[at].size(); ++i) {
          if (steps[at][i] == cells[at][i].steps.size()) continue;
          const InterhostStep& next = cells[at][i].steps[steps[at][i]];
          if (!std::all_of(next.receives.begin(), next.receives.end(),
                           [&](const Envelope& envelope) { return sent.contains({envelope.peer, at, envelope.id}); }))
            continue;
          bool is_held = at == rank && i == cell && steps[at][i] == step;
          for (const Envelope& envelope : next.sends)
            if (!is_held) sent.insert({at, envelope.peer, envelope.id});
          ++steps[at][i];
          moved = true;
        }
      }
    }
  }
};

// Nothing that a later step receives is sent by anybody before what the step before sends has arrived.
int check_answers(const std::vector<Placement>& placements, const InterhostChunk& chunk) {
  HopsWalk all(placements, chunk);
  int answers = 0;
  for (int rank = 0; rank < static_cast<int>(placements.size()); ++rank) {
    for (size_t cell = 0; cell < all.cells[rank].size(); ++cell) {
      const auto& steps = all.cells[rank][cell].steps;
      for (size_t step = 0; step + 1 < steps.size(); ++step) {
        HopsWalk walk(placements, chunk);
        walk.run_without(rank, cell, step);
        for (const Envelope& envelope : steps[step + 1].receives) {
          CHECK(!walk.sent.contains({envelope.peer, rank, envelope.id}));
          ++answers;
        }
      }
    }
  }
  return answers;
}

}  // namespace

TEST(stripes_of_a_host_cover_everything_once) {
  for (const char* hosts : kPlacements) {
    auto placements = everybodys(hosts);
    for (size_t length : {size_t{0}, size_t{1}, size_t{64}, size_t{1000}, size_t{131072}}) {
      for (const auto& ranks : placements[0].members) {
        size_t end = 0;
        for (int rank : ranks) {
          auto [first, past] = stripes_of(placements[rank], length, rank);
          CHECK_EQ(first, end);
          end = past;
        }
        CHECK_EQ(end, length);
      }
    }
  }
}

TEST(counterparts_know_each_other) {
  for (const char* hosts : kPlacements) {
    auto placements = everybodys(hosts);
    for (const Placement& placement : placements) {
      std::set<int> reached;
      for (int peer : counterparts(placement)) {
        auto theirs = counterparts(placements[peer]);
        CHECK(std::count(theirs.begin(), theirs.end(), placement.rank) == 1);
        reached.insert(placement.host_of[peer]);
      }
      CHECK_EQ(static_cast<int>(reached.size()), placement.hosts() - 1);  // so it compares with every host
    }
  }
}

TEST(what_is_sent_is_received) {
  for (const char* hosts : kPlacements) {
    auto placements = everybodys(hosts);
    int size = static_cast<int>(placements.size());
    for (size_t length : {size_t{0}, size_t{4}, size_t{100}, size_t{65536}}) {
      InterhostChunk chunk{.way = Way::Exchange, .root = 0, .block = 2 * length, .begin = length, .length = length};
      for (Way way : {Way::Exchange, Way::Chain, Way::Sums}) {
        if (way == Way::Chain && !placements[0].contiguous) continue;
        chunk.way = way;
        chunk.collective = Collective::AllReduce;
        check_envelopes(placements, chunk);
        if (way == Way::Chain) continue;
        chunk.collective = Collective::ReduceScatter;
        check_envelopes(placements, chunk);
      }
      chunk.way = Way::Exchange;
      for (Collective collective : {Collective::AllGather, Collective::Barrier}) {
        chunk.collective = collective;
        check_envelopes(placements, chunk);
      }
      chunk.collective = Collective::Broadcast;
      for (chunk.root = 0; chunk.root < size; ++chunk.root)
        for (bool relay : {false, true}) {
          chunk.relay = relay;
          check_envelopes(placements, chunk);
        }
      chunk.root = 0;
    }
  }
}

TEST(later_receives_are_answers) {
  for (const char* hosts : kPlacements) {
    auto placements = everybodys(hosts);
    InterhostChunk chunk{.collective = Collective::AllReduce, .root = 0, .block = 4096, .begin = 0, .length = 4096};
    for (Way way : {Way::Exchange, Way::Chain, Way::Sums}) {
      if (way == Way::Chain && !placements[0].contiguous) continue;
      chunk.way = way;
      CHECK(check_answers(placements, chunk) > 0);
    }
  }
}

TEST(hosts_send_sums_where_all_have_a_node_of_the_tree) {
  auto way = [](const std::string& hosts, uint32_t leaves) {
    return way_of_tree(everybodys(hosts)[0], cut_tree(leaves, static_cast<int>(hosts.size())).merges);
  };
  CHECK(way("aabb", 4) == Way::Sums);
  CHECK(way("aabb", 32) == Way::Sums);
  CHECK(way("aaaabbbb", 8) == Way::Sums);
  CHECK(way("aabbccdd", 8) == Way::Sums);
  CHECK(way("abb", 8) == Way::Sums);      // 4, 2 + 2
  CHECK(way("aab", 8) == Way::Exchange);  // 4 + 2, 2: no node
  CHECK(way("aab", 6) == Way::Sums);      // 2 + 2, 2
  CHECK(way("aaab", 4) == Way::Exchange);
  CHECK(way("abab", 4) == Way::Exchange);
  CHECK(way("ab", 4) == Way::Exchange);  // alone, a rank has its sum already
}

TEST(the_chain_is_taken_where_it_is_quicker) {
  Operation operation{};
  std::vector<std::byte> memory(1 << 20);
  operation.input = operation.output = SpanList(memory.data(), memory.size());
  HostAlgorithm algorithm = HostAlgorithm::Auto;
  auto way = [&](const std::string& hosts, DType dtype) {
    operation.dtype = dtype;
    return choose_way(choose_interhost(everybodys(hosts)[0], algorithm, 128 << 10), operation);
  };
  CHECK(way("ab", DType::Float32) == Way::Exchange);
  CHECK(way("aabb", DType::Float32) == Way::Chain);
  CHECK(way("aabb", DType::BFloat16) == Way::Exchange);
  CHECK(way("aaaabbbb", DType::BFloat16) == Way::Chain);
  CHECK(way("abab", DType::Float32) == Way::Exchange);  // no chain through interleaved ranks
  operation.numerics = Numerics::Ring;
  CHECK(way("aabb", DType::Float32) == Way::Exchange);
  operation.numerics = Numerics::Fast;
  CHECK(way("abab", DType::Float32) == Way::Sums);
  operation.numerics = Numerics::RankOrder;
  operation.input = operation.output = SpanList(memory.data(), 4096);
  CHECK(way("aabb", DType::Float32) == Way::Exchange);  // what is one chunk crosses twice, one after the other
  algorithm = HostAlgorithm::Chain;
  CHECK(way("aabb", DType::Float32) == Way::Chain);
  CHECK(way("abab", DType::Float32) == Way::Exchange);
  algorithm = HostAlgorithm::Exchange;
  operation.input = operation.output = SpanList(memory.data(), memory.size());
  CHECK(way("aabb", DType::Float32) == Way::Exchange);
  // Four hosts of four ranks: what is large wants few bytes, what is small few hops.
  algorithm = HostAlgorithm::Auto;
  std::string many = "aaaabbbbccccdddd";
  const auto choice = choose_interhost(everybodys(many)[0], algorithm, 128 << 10);
  CHECK(way(many, DType::Float32) == Way::Chain && choice.relays(operation));
  operation.input = operation.output = SpanList(memory.data(), 16 << 10);
  CHECK(way(many, DType::Float32) == Way::Exchange && !choice.relays(operation));
  operation.input = operation.output = SpanList(memory.data(), size_t{1} << 40);  // nobody looks into it
  CHECK(way("abcdefgh", DType::Float32) == Way::Exchange);
  CHECK(way("aabbccdd", DType::Float32) == Way::Chain);
}

}  // namespace syncengine
