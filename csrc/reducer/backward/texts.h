// What is said when a backward goes wrong: here, and to those that wait for it.
#pragma once

#include <cstddef>
#include <string>

#include "engine/communicator/communicator.h"
#include "reducer/parameters/parameters.h"

namespace syncengine {

struct Model;

// "rank 1 raised in forward: ..." or "rank 1: the text".
std::string said_here(const Communicator& communicator, const std::string& text);

// Of the exception that is being handled: what an Error says; of any other only that backward has ended so.
std::string text_for_peers();

// They wait for gradients that this rank will not bring, and no step is there to be refused: ends the communicator.
void tell_peers(Communicator& communicator, const std::string& text);

// Its backward waits for gradients that did not come.
std::string unfinished_text(const Model& model);

std::string removed_text(const Parameters& parameters);
std::string dropped_text(const Parameters& parameters);
// `lost`: why the step of that forward was, if it was.
std::string consumed_text(const Parameters& parameters, const std::string& lost);
std::string uncovered_text(const Parameters& parameters, size_t index);
std::string left_text(const Parameters& parameters, size_t index);
std::string averaged_twice_text(const Parameters& parameters, size_t index);
std::string collected_twice_text(const Parameters& parameters, size_t index);

}  // namespace syncengine
