#include "core/crc32c.h"

#include <array>
#include <cstring>

// INGOT_CRC_TARGET marks functions that use the processor's CRC-32C instruction; it is undefined on other
// architectures.
#if defined(__x86_64__)
#define INGOT_CRC_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))
#include <arm_acle.h>
#if defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif
#if defined(__clang__)
#define INGOT_CRC_TARGET __attribute__((target("crc")))
#else
#define INGOT_CRC_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace ingot {
namespace {

constexpr std::uint32_t kPolynomial = 0x82F63B78u;  // reflected

constexpr std::array<std::array<std::uint32_t, 256>, 8> make_tables() {
  std::array<std::array<std::uint32_t, 256>, 8> t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    t[0][i] = c;
  }
  for (std::uint32_t i = 0; i < 256; ++i)
    for (int k = 1; k < 8; ++k) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 255];
  return t;
}

constexpr auto kTables = make_tables();

// The product of two polynomials modulo that of the CRC; the highest bit of a word is x^0.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (int i = 31; i >= 0; --i) {
    if (a >> i & 1) product ^= b;
    b = (b >> 1) ^ ((b & 1) ? kPolynomial : 0);
  }
  return product;
}

// x^(8 * 2^k), the factor by which 2^k zero bytes multiply a CRC register.
constexpr std::array<std::uint32_t, 64> make_powers() {
  std::array<std::uint32_t, 64> powers{};
  powers[0] = std::uint32_t{1} << 23;
  for (std::size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}

constexpr auto kPowers = make_powers();

#if defined(INGOT_CRC_TARGET)
// A linear map of the CRC register: column i is the image of bit i.
using Matrix = std::array<std::uint32_t, 32>;

constexpr std::uint32_t apply(const Matrix& map, std::uint32_t value) {
  std::uint32_t result = 0;
  for (int i = 0; i < 32; ++i)
    if (value >> i & 1) result ^= map[i];
  return result;
}

// The effect of 2^doublings zero bytes on the register, as one table per byte of it.
constexpr std::array<std::array<std::uint32_t, 256>, 4> zeros_table(int doublings) {
  Matrix map{};
  for (int i = 0; i < 32; ++i) {
    const std::uint32_t bit = std::uint32_t{1} << i;
    map[i] = (bit >> 8) ^ kTables[0][bit & 255];
  }
  for (int k = 0; k < doublings; ++k) {
    Matrix twice{};
    for (int i = 0; i < 32; ++i) twice[i] = apply(map, map[i]);
    map = twice;
  }
  std::array<std::array<std::uint32_t, 256>, 4> table{};
  for (std::uint32_t byte = 0; byte < 4; ++byte)
    for (std::uint32_t i = 0; i < 256; ++i) table[byte][i] = apply(map, i << (8 * byte));
  return table;
}

// Short runs help the hardware prefetchers: on a Zen 4 core 21 GB/s from memory, against 8 with 1 KiB runs.
constexpr int kLogRun = 8;
constexpr std::size_t kRun = std::size_t{1} << kLogRun;
constexpr auto kZeros = zeros_table(kLogRun);

std::uint32_t skip_run(std::uint32_t c) {
  return kZeros[0][c & 255] ^ kZeros[1][c >> 8 & 255] ^ kZeros[2][c >> 16 & 255] ^ kZeros[3][c >> 24];
}

std::uint64_t load(const std::uint8_t* p) {
  std::uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

#if defined(__x86_64__)
// The instruction zeroes the upper half of its 64-bit register.
using Register = std::uint64_t;

INGOT_CRC_TARGET Register add_word(Register c, std::uint64_t word) { return __builtin_ia32_crc32di(c, word); }

INGOT_CRC_TARGET Register add_byte(Register c, std::uint8_t byte) {
  return __builtin_ia32_crc32qi(static_cast<std::uint32_t>(c), byte);
}

bool detect_instruction() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("sse4.2") != 0;
}
#else
using Register = std::uint32_t;

INGOT_CRC_TARGET Register add_word(Register c, std::uint64_t word) { return __crc32cd(c, word); }

INGOT_CRC_TARGET Register add_byte(Register c, std::uint8_t byte) { return __crc32cb(c, byte); }

bool detect_instruction() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return true;  // every Apple processor with 64 bits that runs macOS has it
#endif
}
#endif

// The instruction processes eight bytes per cycle with a latency of two or three cycles, so three runs are processed in
// parallel and combined: the register after A and B is that of A advanced by len(B) zero bytes, plus that of B started
// from 0.
INGOT_CRC_TARGET std::uint32_t by_instruction(std::uint32_t crc, const std::uint8_t* p, std::size_t n) {
  Register c = static_cast<std::uint32_t>(~crc);
  for (; n >= 3 * kRun; n -= 3 * kRun, p += 3 * kRun) {
    Register first = c, second = 0, third = 0;
    for (std::size_t i = 0; i < kRun; i += 8) {
      first = add_word(first, load(p + i));
      second = add_word(second, load(p + kRun + i));
      third = add_word(third, load(p + 2 * kRun + i));
    }
    const std::uint32_t joined = skip_run(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second);
    c = skip_run(joined) ^ static_cast<std::uint32_t>(third);
  }
  for (; n >= 8; n -= 8, p += 8) c = add_word(c, load(p));
  for (; n; --n, ++p) c = add_byte(c, *p);
  return ~static_cast<std::uint32_t>(c);
}
#endif

}  // namespace

bool crc32c_has_instruction() {
#if defined(INGOT_CRC_TARGET)
  static const bool available = detect_instruction();
  return available;
#else
  return false;
#endif
}

// CRC(A B) = CRC(A) * x^(8 |B|) + CRC(B): the register is linear in what came before, and the inversions cancel.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_size) {
  for (std::size_t k = 0; second_size; ++k, second_size >>= 1)
    if (second_size & 1) first = multiply(kPowers[k], first);
  return first ^ second;
}

std::uint32_t crc32c(std::uint32_t crc, const std::uint8_t* p, std::size_t n) {
#if defined(INGOT_CRC_TARGET)
  if (crc32c_has_instruction()) return by_instruction(crc, p, n);
#endif
  return crc32c_by_table(crc, p, n);
}

std::uint32_t crc32c_by_table(std::uint32_t crc, const std::uint8_t* p, std::size_t n) {
  std::uint32_t c = ~crc;
  for (; n >= 8; n -= 8, p += 8) {
    const std::uint32_t lo = c ^ (p[0] | p[1] << 8 | p[2] << 16 | static_cast<std::uint32_t>(p[3]) << 24);
    c = kTables[7][lo & 255] ^ kTables[6][lo >> 8 & 255] ^ kTables[5][lo >> 16 & 255] ^ kTables[4][lo >> 24] ^
        kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
  }
  for (; n; --n, ++p) c = (c >> 8) ^ kTables[0][(c ^ *p) & 255];
  return ~c;
}

}  // namespace ingot
