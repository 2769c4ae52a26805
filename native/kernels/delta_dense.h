// Encodes chunks with many changed elements: symbols with ANS or rANS, with the base's exponent as context, and the
// open bits of symbols. Once per instruction set.
#pragma once
#include "kernels/delta.h"
#include "kernels/entropy_rans.h"

namespace ingot::INGOT_ISA {
namespace {

// The coder of a chunk's symbols: ANS, or rANS in large chunks.
struct Coders {
  AnsEncoder<kDeltaScaleBits> tabled[kDeltaContexts];
  RansCoder<kDeltaScaleBits, kDeltaContexts * kDeltaSymbols> ranged;
};

// The largest count with a precomputed logarithm.
constexpr std::size_t kLogs = 4096;

struct DenseWork {
  void* differences;  // words
  std::uint16_t* symbols;
  std::uint16_t* placed;  // symbols, grouped by context
  Byte* bins;
  Byte* room;
  std::uint32_t* counts;  // kDeltaBins rows of kDeltaSymbols
  std::uint32_t logs[kLogs];
  bool has_logs = false;

  void need_logs() {
    if (has_logs) return;
    logs[0] = 0;
    for (std::size_t i = 1; i < kLogs; ++i) logs[i] = log2_fixed(i);
    has_logs = true;
  }
  std::uint32_t log2(std::uint64_t value) const { return value < kLogs ? logs[value] : log2_fixed(value); }
  std::uint32_t* row(std::size_t bin) const { return counts + bin * kDeltaSymbols; }
};

// A range of bins that share a table.
struct Group {
  std::size_t bin;       // the first symbol that occurs
  std::uint64_t cost;    // cost of coding the group separately, in 2^-12 bits
  std::uint64_t joined;  // cost of coding it together with the next group
};

struct DensePlan {
  std::size_t groups;
  Group group[kDeltaBins];
  std::size_t symbols;  // of the element type
  std::uint64_t open;   // open bits of the symbols
  std::size_t bytes;    // bytes of the chunk, mode included: an estimate
};

// The cost of coding with the sum of two rows of counts, in 2^-12 bits: the ideal size plus an estimate of the table's.
inline std::uint64_t cost_of(const DenseWork& work, const std::uint32_t* first, const std::uint32_t* second,
                             std::size_t symbols) {
  std::uint64_t total = 0, distinct = 0, less = 0;
  for (std::size_t symbol = 0; symbol < symbols; ++symbol) {
    const std::uint64_t count = std::uint64_t{first[symbol]} + (second ? second[symbol] : 0);
    if (!count) continue;
    total += count;
    ++distinct;
    less += count * work.log2(count);
  }
  return total * work.log2(total) - less + ((distinct + 8) << 15);
}

// Merges neighbouring groups as long as that reduces the cost, or there are too many groups.
inline void join_groups(const DenseWork& work, DensePlan& plan) {
  Group* const group = plan.group;
  const auto look = [&](std::size_t i) {
    group[i].joined = cost_of(work, work.row(group[i].bin), work.row(group[i + 1].bin), plan.symbols);
  };
  for (std::size_t i = 0; i + 1 < plan.groups; ++i) look(i);
  while (plan.groups > 1) {
    std::size_t best = 0;
    std::int64_t gain = INT64_MIN;
    for (std::size_t i = 0; i + 1 < plan.groups; ++i) {
      const std::int64_t saved = static_cast<std::int64_t>(group[i].cost + group[i + 1].cost - group[i].joined);
      if (saved > gain) {
        gain = saved;
        best = i;
      }
    }
    if (gain < 0 && plan.groups <= kDeltaContexts) return;
    std::uint32_t *const to = work.row(group[best].bin), *const from = work.row(group[best + 1].bin);
    for (std::size_t symbol = 0; symbol < plan.symbols; ++symbol) to[symbol] += from[symbol];
    group[best].cost = group[best].joined;
    --plan.groups;
    for (std::size_t i = best + 1; i < plan.groups; ++i) group[i] = group[i + 1];
    if (best) look(best - 1);
    if (best + 1 < plan.groups) look(best);
  }
}

template <class Element>
inline void count_symbols(const typename Element::Word* base, const typename Element::Word* tuned, std::size_t n,
                          int shift, DenseWork& work, DensePlan& plan) {
  std::memset(work.counts, 0, sizeof(std::uint32_t) * kDeltaBins * kDeltaSymbols);
  for (std::size_t i = 0; i < n; ++i) work.bins[i] = bin_of<Element>(base[i], shift);
  typename Element::Word* const __restrict differences = static_cast<typename Element::Word*>(work.differences);
  std::uint16_t* const __restrict symbols = work.symbols;
  for (std::size_t start = 0; start < n; start += kBlock) {
    const std::size_t stop = min_of(start + kBlock, n);
    for (std::size_t i = start; i < stop; ++i) {
      differences[i] = Element::difference(base[i], tuned[i]);
      symbols[i] = static_cast<std::uint16_t>(symbol_of<Element>(differences[i]));
    }
    for (std::size_t i = start; i < stop; ++i) ++work.row(work.bins[i])[symbols[i]];
  }
  plan.open = 0;
  plan.symbols = kSymbolsOf<Element>;
}

template <class Element>
inline void plan_dense(const typename Element::Word* base, const typename Element::Word* tuned, std::size_t n,
                       int shift, DenseWork& work, DensePlan& plan) {
  count_symbols<Element>(base, tuned, n, shift, work, plan);
  work.need_logs();
  plan.groups = 0;
  for (std::size_t bin = 0; bin < kDeltaBins; ++bin) {
    std::uint32_t any = 0;
    for (std::size_t symbol = 0; symbol < plan.symbols; ++symbol) any |= work.row(bin)[symbol];
    if (!any) continue;
    for (std::size_t symbol = 0; symbol < plan.symbols; ++symbol)
      plan.open += std::uint64_t{work.row(bin)[symbol]} * open_bits<Element>(symbol);
    plan.group[plan.groups++] = {bin, cost_of(work, work.row(bin), nullptr, plan.symbols), 0};
  }
  join_groups(work, plan);
  std::uint64_t cost = 0;
  for (std::size_t k = 0; k < plan.groups; ++k) cost += plan.group[k].cost;
  plan.bytes = 2 + plan.groups + (n < kRansElements ? 5 * kStreams : kRansHead) + ((cost + (8 << 12) - 1) >> 15) + (plan.open + 7) / 8;
}

// Writes the open bits of all elements; exactly `size` bytes.
template <class Element>
inline Byte* write_open(const DenseWork& work, std::size_t n, Byte* p, std::size_t size) {
  Byte lengths[kDeltaSymbols];
  for (std::size_t symbol = 0; symbol < kSymbolsOf<Element>; ++symbol)
    lengths[symbol] = static_cast<Byte>(open_bits<Element>(symbol));
  const typename Element::Word* const differences = static_cast<const typename Element::Word*>(work.differences);
  const Byte* const end = p + size;
  std::uint64_t bits = 0;
  unsigned bit_count = 0;
  const auto put = [&](std::uint64_t value, unsigned count) {  // at most 32 bits; at most 7 are pending
    bits |= (value & ~(~std::uint64_t{0} << count)) << bit_count;
    bit_count += count;
    if (end - p >= 8)
      store_le<std::uint64_t>(p, bits);
    else
      for (unsigned i = 0; 8 * i < bit_count; ++i) p[i] = static_cast<Byte>(bits >> (8 * i));
    p += bit_count >> 3;
    bits >>= bit_count & ~7u;
    bit_count &= 7;
  };
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint64_t value = differences[i] >> Element::kLow;
    const unsigned count = lengths[work.symbols[i]], first = count < 32 ? count : 32;
    put(value, first);
    if constexpr (sizeof(typename Element::Word) == 8) put(value >> first, count - first);
  }
  return p + (bit_count != 0);
}

// Writes symbols and their open bits; returns null if that would pass `end`. `contexts` has the context of each bin.
template <class Element>
inline Byte* write_symbols(const DensePlan& plan, std::size_t n, const Byte* contexts, DenseWork& work, const Coders& coders, Byte* p,
                           const Byte* end) {
  const std::size_t open = (plan.open + 7) / 8;
  if (static_cast<std::size_t>(end - p) < open) return nullptr;
  if (n < kRansElements) {
    for (std::size_t i = 0; i < n; ++i) work.bins[i] = contexts[work.bins[i]];
    p = write_streams<kDeltaScaleBits>(
        n, work.room, p, end - open, [&](std::size_t i) -> const auto& { return coders.tabled[work.bins[i]]; },
        [&](std::size_t i) { return work.symbols[i]; });
  } else {
    for (std::size_t i = 0; i < n; ++i) work.placed[i] = static_cast<std::uint16_t>(contexts[work.bins[i]] * kDeltaSymbols + work.symbols[i]);
    p = write_rans(work.placed, n, coders.ranged, work.room, p, end - open);
  }
  return p ? write_open<Element>(work, n, p, open) : nullptr;
}

// Writes a planned chunk of n elements; returns null if that would pass `end`.
template <class Element>
inline Byte* write_dense(const DensePlan& plan, std::size_t n, DenseWork& work, Coders& coders, Byte* p, const Byte* end) {
  Byte contexts[kDeltaBins] = {};
  if (static_cast<std::size_t>(end - p) < 1 + plan.groups) return nullptr;
  *p++ = n < kRansElements ? kDense : kDenseRans;
  *p++ = static_cast<Byte>(plan.groups - 1);
  for (std::size_t k = 1; k < plan.groups; ++k) {
    *p++ = static_cast<Byte>(plan.group[k].bin);
    for (std::size_t bin = plan.group[k].bin; bin < kDeltaBins; ++bin) contexts[bin] = static_cast<Byte>(k);
  }
  AnsPlan ans;
  for (std::size_t k = 0; k < plan.groups; ++k) {
    plan_ans<kDeltaScaleBits>(work.row(plan.group[k].bin), plan.symbols, ans);
    if (static_cast<std::size_t>(end - p) < ans.table_bytes) return nullptr;
    p = write_frequencies(ans, p);
    if (n < kRansElements)
      fill_encoder(ans, coders.tabled[k]);
    else
      coders.ranged.fill(ans, k * kDeltaSymbols);
  }
  return write_symbols<Element>(plan, n, contexts, work, coders, p, end);
}

}  // namespace
}  // namespace ingot::INGOT_ISA
