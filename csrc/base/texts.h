// Ranks and times as texts of errors name them: "rank 2", "ranks 1, 3", "5.0 s".
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "base/deadline.h"

namespace syncengine {

inline std::string rank_name(int rank) { return "rank " + std::to_string(rank); }

template <class Ranks>
std::string rank_names(const Ranks& ranks) {
  std::string list;
  for (int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

// Names the members in `mask`, whose ranks in the job are `ranks`; empty if the mask is.
inline std::string rank_names(const std::vector<int>& ranks, uint64_t mask) {
  std::vector<int> named;
  for (size_t member = 0; member < ranks.size(); ++member)
    if (mask >> member & 1) named.push_back(ranks[member]);
  return named.empty() ? "" : rank_names(named);
}

// Takes a rank's number in a group, and names the rank by its number in the whole job, as texts for users do. If
// `global_ranks` is empty, the number in the group is used.
struct RankNames {
  std::vector<int> global_ranks = {};

  int global(int rank) const { return global_ranks.empty() ? rank : global_ranks.at(rank); }
  std::string operator()(int rank) const { return rank_name(global(rank)); }
  template <class Ranks>
  std::string all(const Ranks& ranks) const {
    std::vector<int> named;
    for (int rank : ranks) named.push_back(global(rank));
    return rank_names(named);
  }
};

inline std::string seconds_text(double seconds) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.1f s", seconds);
  return text;
}
inline std::string seconds_text(Duration duration) {
  return seconds_text(std::chrono::duration<double>(duration).count());
}

}  // namespace syncengine
