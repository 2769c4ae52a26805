// Which instruction set the kernels run with: the best that the processor has, or a lower one chosen for tests.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace ingot {

enum class Isa { baseline = 0, v3 = 1, v4 = 2 };

// The CPUID words of an x86 processor that are used (Intel SDM volume 2), and XCR0, the registers whose contents the
// system saves.
struct CpuWords {
  std::uint32_t leaf1_ecx, leaf7_ebx, extended_ecx, xcr0;
};

// The best that was compiled and that such a processor can run.
Isa best_isa(const CpuWords& words);

Isa current_isa();
const char* isa_name(Isa isa);
std::vector<std::string> available_isas();

// Returns false where the name is unknown or the processor lacks it. Not for use while kernels run.
bool select_isa(const std::string& name);

// Whether products of tiles in bf16 (AMX) are there and the system lets this process have them, which it asks for.
bool has_tiles();

// Whether products of pairs of bf16 in one instruction are there, and kernels of this instruction set have them: AVX512_BF16.
bool has_pair_dots(Isa isa);

// Whether sums of products of bytes are there, and kernels of this instruction set have them: AVX512_VNNI, `sdot` of arm64.
bool has_dots(Isa isa);

}  // namespace ingot
