// Which instruction set the kernels run with: the best that the processor has, or a lower one chosen for tests.
#pragma once
#include <string>
#include <vector>

namespace ingot {

enum class Isa { baseline = 0, v3 = 1, v4 = 2 };

Isa current_isa();
const char* isa_name(Isa isa);
std::vector<std::string> available_isas();

// Returns false where the name is unknown or the processor lacks it. Not for use while kernels run.
bool select_isa(const std::string& name);

}  // namespace ingot
