// What is said when a backward goes wrong.
#pragma once

#include <cstddef>
#include <string>

#include "reducer/parameters/parameters.h"

namespace syncengine {

struct Model;

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
