// The instruction set of the kernels: the best that the processor supports, or a lower one for tests.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ingot {

enum class Isa { baseline = 0, v3 = 1, v4 = 2 };

// The CPUID words of an x86 processor that are used (Intel SDM volume 2), and XCR0, the registers that the system
// saves.
struct CpuWords {
  std::uint32_t leaf1_ecx, leaf7_ebx, extended_ecx, xcr0;
};

// The best compiled instruction set that such a processor can run.
Isa best_isa(const CpuWords& words);

Isa current_isa();
const char* isa_name(Isa isa);
std::vector<std::string> available_isas();

// Returns false if the name is unknown or the processor does not support it. Not to be called while kernels run.
bool select_isa(const std::string& name);

// Returns whether tile products in bf16 (AMX) exist and the system grants this process their use, which this call
// requests.
bool has_tiles();

// Returns whether AVX512_BF16 (products of pairs of bf16) exists and the kernels of the active instruction set use it.
bool has_pair_dots(Isa isa);

// Returns whether byte dot products (AVX512_VNNI, `sdot` of arm64) exist and the kernels of the active instruction set
// use them.
bool has_dots(Isa isa);

}  // namespace ingot
