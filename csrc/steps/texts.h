// Texts for a backward that goes wrong: for errors here, and for the peers that wait for it.
//
// Ownership: none. Thread-safety: any thread. Failure: none.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace syncengine {

// The names by which texts call a model and its parameters.
struct ModelNames {
  std::string model;                    // "Parallel(GPT)"
  std::vector<std::string> parameters;  // by index
};

// Puts the rank before a text: "rank 1 raised in forward: ..." or "rank 1: the text". Ranks in this file are the job's.
std::string said_by(int rank, const std::string& text);

// Called in a catch block. Returns the text of its exception for the peers: an Error's own, or "backward aborted".
std::string text_for_peers();

// A parameter of the plan, and whether this backward has brought its gradient.
struct Awaited {
  size_t parameter;
  bool came;
};
// The error of a backward that waits for gradients that did not come. `awaited` is in the order of registration.
std::string unfinished_text(const ModelNames& names, const std::vector<Awaited>& awaited, int rank, bool is_static);

std::string second_backward_text(const ModelNames& names);
std::string two_weights_text(const ModelNames& names);
std::string removed_text(const ModelNames& names);
std::string dropped_text(const ModelNames& names);
// The error of a backward through a forward that was averaged before, or whose step was lost: `lost` says why.
std::string consumed_text(const ModelNames& names, const std::string& lost);
std::string uncovered_text(const ModelNames& names, size_t index);
std::string left_text(const ModelNames& names, size_t index);
std::string averaged_twice_text(const ModelNames& names, size_t index);
std::string hasty_text(const ModelNames& names, size_t index);
std::string changed_graph_text(const ModelNames& names, size_t index);
std::string collected_twice_text(const ModelNames& names, size_t index);
std::string skipped_text(const ModelNames& names, size_t index);

}  // namespace syncengine
