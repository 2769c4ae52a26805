// Codes bytes as symbols in contexts, and moves bit fields of records to and from the streams of symbols. The bytes to
// decode are untrusted. spec/packed.md defines the layout.
#include "core/symbols.h"

#include "kernels/entropy_rans_read.h"
#include "kernels/kernels.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kValues = 256, kHalves = 16;
constexpr std::size_t kTableMost = 4 + 2 * kValues;  // bytes of the largest table
constexpr std::size_t kMoveTile = 8192;  // bytes of records that stay in the first-level cache

using Frequencies = std::uint16_t[kValues];

// Changes frequencies above half of the largest one by one, in ascending order of values and repeatedly, until the sum
// is 2^kRansBits.
void correct_sum(std::uint16_t* freq, std::size_t values) {
  std::int32_t remaining = 1 << kRansBits;
  for (std::size_t value = 0; value < values; ++value) remaining -= freq[value];
  while (remaining != 0) {
    std::uint32_t largest = 0;
    for (std::size_t value = 0; value < values; ++value) largest = freq[value] > largest ? freq[value] : largest;
    const std::int32_t step = remaining < 0 ? -1 : 1;
    for (std::size_t value = 0; value < values && remaining != 0; ++value) {
      if (2u * freq[value] <= largest) continue;
      freq[value] = static_cast<std::uint16_t>(freq[value] + step);
      remaining -= step;
    }
  }
}

// Computes the frequencies of pairs from those of both halves, each with the sum 2^kRansBits: the product, rounded to
// nearest and at least 1, with a corrected sum.
void multiply(const std::uint16_t* low, const std::uint16_t* high, Frequencies& result) {
  constexpr std::uint32_t half = 1u << (kRansBits - 1);
  for (std::size_t value = 0; value < kValues; ++value) {
    const std::uint32_t product = std::uint32_t{high[value / kHalves]} * low[value % kHalves];
    const std::uint32_t nearest = (product + half) >> kRansBits;
    result[value] = static_cast<std::uint16_t>(product == 0 ? 0 : nearest == 0 ? 1 : nearest);
  }
  correct_sum(result, kValues);
}

// Scales counts to frequencies in the same way.
void scale(const std::uint32_t* counts, std::size_t values, std::uint16_t* freq) {
  std::uint64_t total = 0;
  for (std::size_t value = 0; value < values; ++value) total += counts[value];
  for (std::size_t value = 0; value < values; ++value) {
    const std::uint64_t nearest = ((std::uint64_t{counts[value]} << kRansBits) + total / 2) / total;
    freq[value] = static_cast<std::uint16_t>(counts[value] == 0 ? 0 : nearest == 0 ? 1 : nearest);
  }
  correct_sum(freq, values);
}

void set_plan(const std::uint16_t* freq, std::size_t values, AnsPlan& plan) {
  std::memcpy(plan.freq, freq, values * sizeof *freq);
  plan.first = 0;
  while (!plan.freq[plan.first]) ++plan.first;
  plan.last = values - 1;
  while (!plan.freq[plan.last]) --plan.last;
}

// Counts n symbols. Neighbours are often equal: several counters avoid waiting for the previous increment.
void count_symbols(const Byte* in, std::size_t n, std::uint32_t* counts) {
  std::uint32_t counters[4][kValues] = {};
  std::size_t i = 0;
  for (; i + 4 <= n; i += 4)
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; ++k) ++counters[k][in[i + k]];
  for (; i < n; ++i) ++counters[0][in[i]];
  for (std::size_t value = 0; value < kValues; ++value)
    counts[value] = counters[0][value] + counters[1][value] + counters[2][value] + counters[3][value];
}

// Copies units between their positions in `placed` and runs of the same context, which begin at `runs + starts[context]`.
template <std::size_t kUnit, bool kGather>
void sort_units(const SymbolShape& shape, const std::size_t* starts, Byte* placed, Byte* runs) {
  const std::size_t unit = kUnit ? kUnit : shape.unit;
  Byte* next[kContextsMost];
  for (std::size_t context = 0; context < shape.context_count; ++context) next[context] = runs + starts[context];
  for (std::size_t u = 0; u < shape.units; ++u, placed += unit) {
    Byte*& run = next[shape.contexts[u]];
    std::memcpy(kGather ? run : placed, kGather ? placed : run, unit);
    run += unit;
  }
}

template <bool kGather>
void sort_units(const SymbolShape& shape, const std::size_t* starts, Byte* placed, Byte* runs) {
  if (shape.unit == 1) return sort_units<1, kGather>(shape, starts, placed, runs);
  if (shape.unit == 16) return sort_units<16, kGather>(shape, starts, placed, runs);
  return shape.unit == 32 ? sort_units<32, kGather>(shape, starts, placed, runs) : sort_units<0, kGather>(shape, starts, placed, runs);
}

// Sets the number of symbols of every context, and the first symbol of each if they are sorted by context.
void count_contexts(const SymbolShape& shape, std::size_t* symbols, std::size_t* starts) {
  for (std::size_t context = 0; context < kContextsMost; ++context) symbols[context] = 0;
  if (shape.contexts)
    for (std::size_t u = 0; u < shape.units; ++u) symbols[shape.contexts[u]] += shape.unit;
  else
    symbols[0] = shape.size();
  for (std::size_t context = 0, start = 0; context < kContextsMost; start += symbols[context++]) starts[context] = start;
}

// Writes the table of a context and stores its frequencies in `plan`; returns null if there may be too little room.
Byte* write_table(const std::uint32_t* counts, bool pairs, AnsPlan& plan, Byte* p, const Byte* end) {
  if (static_cast<std::size_t>(end - p) < kTableMost) return nullptr;
  Frequencies freq;
  if (!pairs) {
    scale(counts, kValues, freq);
    set_plan(freq, kValues, plan);
    return write_frequencies(plan, p);
  }
  std::uint32_t halves[2][kHalves] = {};
  for (std::size_t value = 0; value < kValues; ++value) {
    halves[0][value % kHalves] += counts[value];
    halves[1][value / kHalves] += counts[value];
  }
  std::uint16_t half_freq[2][kHalves];
  for (std::size_t k = 0; k < 2; ++k) {
    scale(halves[k], kHalves, half_freq[k]);
    set_plan(half_freq[k], kHalves, plan);
    p = write_frequencies(plan, p);
  }
  multiply(half_freq[0], half_freq[1], freq);
  set_plan(freq, kValues, plan);
  return p;
}

bool read_table(const Byte*& p, const Byte* end, bool pairs, Frequencies& freq) {
  AnsFrequencies table;
  if (!pairs) {
    if (!read_frequencies<kRansBits>(p, end, kValues, table)) return false;
    std::memcpy(freq, table.freq, sizeof freq);
    return true;
  }
  std::uint16_t low[kHalves];
  if (!read_frequencies<kRansBits>(p, end, kHalves, table)) return false;
  std::memcpy(low, table.freq, sizeof low);
  if (!read_frequencies<kRansBits>(p, end, kHalves, table)) return false;
  multiply(low, table.freq, freq);
  return true;
}

// Decodes the next `count` symbols with one table.
bool read_run(RansStream& stream, const std::uint32_t* table, std::size_t count, Byte* out) {
  alignas(64) std::uint16_t block[kSixBlock];
  for (std::size_t start = 0; start < count; start += kSixBlock) {
    const std::size_t n = min_of(kSixBlock, count - start);
    if (!read_slots<kRansBits, false>(stream, table, nullptr, n, block)) return false;
    for (std::size_t i = 0; i < n; ++i) out[start + i] = static_cast<Byte>(block[i]);
  }
  return true;
}

// The elements of a field in one record; with kCount 0 their number is `count`.
template <std::size_t kCount>
void move_field(const BitMove& move, const Byte* __restrict in, Byte* __restrict out, std::size_t records) {
  const std::size_t n = kCount ? kCount : move.count;
  const Byte* __restrict from = in + move.source;
  Byte* __restrict to = out + move.target;
  if (move.mask == 0xff) {
    for (std::size_t r = 0; r < records; ++r, from += move.source_stride, to += move.target_stride) std::memcpy(to, from, n);
    return;
  }
  const Byte mask = move.mask, down = move.source_shift, up = move.target_shift;
  for (std::size_t r = 0; r < records; ++r, from += move.source_stride, to += move.target_stride)
    for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<Byte>(to[i] | (from[i] >> down & mask) << up);
}

void move_single_bits(const BitMove& move, const Byte* __restrict in, Byte* __restrict out, std::size_t records) {
  const Byte* __restrict from = in + move.source;
  Byte* __restrict to = out + move.target;
  for (std::size_t r = 0; r < records; ++r, from += move.source_stride, to += move.target_stride) {
    if (move.bits == BitSide::source)
      for (std::size_t i = 0; i < move.count; ++i)
        to[i] = static_cast<Byte>(to[i] | (from[i / 8] >> (i % 8) & 1) << move.target_shift);
    else
      for (std::size_t i = 0; i < move.count; ++i)
        to[i / 8] = static_cast<Byte>(to[i / 8] | (from[i] >> move.source_shift & 1) << (i % 8));
  }
}

}  // namespace

std::size_t symbols_encode(const std::uint8_t* in, const SymbolShape& shape, std::uint8_t* out, std::size_t limit,
                           std::uint8_t* scratch) {
  const std::size_t size = shape.size();
  std::size_t counts[kContextsMost], starts[kContextsMost];
  count_contexts(shape, counts, starts);
  std::uint16_t* const symbols = reinterpret_cast<std::uint16_t*>(scratch);
  Byte* const room = scratch + 2 * size;
  const Byte* sorted = in;
  if (shape.contexts) {
    sort_units<true>(shape, starts, const_cast<Byte*>(in), room);  // reads from `in` only
    sorted = room;
  }
  RansCoder<kRansBits, kContextsMost * kValues> coder;
  Byte* p = out;
  const Byte* const end = out + limit;
  for (std::size_t context = 0; context < shape.context_count; ++context) {
    if (!counts[context]) continue;
    const Byte* const run = sorted + starts[context];
    std::uint32_t values[kValues];
    count_symbols(run, counts[context], values);
    AnsPlan plan;
    p = write_table(values, shape.pairs, plan, p, end);
    if (!p) return 0;
    coder.fill(plan, context * kValues);
    std::uint16_t* __restrict const to = symbols + starts[context];
    for (std::size_t i = 0; i < counts[context]; ++i) to[i] = static_cast<std::uint16_t>(context * kValues + run[i]);
  }
  p = write_rans(symbols, size, coder, room, p, end);
  return p ? static_cast<std::size_t>(p - out) : 0;
}

EntropyStatus symbols_decode(const std::uint8_t* data, std::size_t size, const SymbolShape& shape, std::uint8_t* out,
                             std::uint8_t* scratch) {
  std::size_t counts[kContextsMost], starts[kContextsMost];
  count_contexts(shape, counts, starts);
  Frequencies freq[kContextsMost];
  const Byte* p = data;
  const Byte* const end = data + size;
  for (std::size_t context = 0; context < shape.context_count; ++context)
    if (counts[context] && !read_table(p, end, shape.pairs, freq[context])) return EntropyStatus::table;
  RansStream stream;
  if (!open_rans(p, end, shape.size(), stream) || p != end) return EntropyStatus::stream;
  Byte* const symbols = shape.contexts ? scratch : out;
  for (std::size_t context = 0; context < shape.context_count; ++context) {
    if (!counts[context]) continue;
    alignas(64) std::uint32_t table[1u << kRansBits];
    AnsFrequencies from;
    from.first = 0;
    from.last = kValues - 1;
    std::memcpy(from.freq, freq[context], sizeof freq[context]);
    fill_slots<kRansBits>(from, table, [](std::size_t symbol) { return static_cast<std::uint32_t>(symbol); });
    if (!read_run(stream, table, counts[context], symbols + starts[context])) return EntropyStatus::stream;
  }
  if (!ended(stream)) return EntropyStatus::stream;
  if (shape.contexts) sort_units<false>(shape, starts, out, symbols);
  return EntropyStatus::ok;
}

void move_bits(const std::uint8_t* in, std::uint8_t* out, std::size_t records, const BitMove* moves, std::size_t count) {
  std::size_t widest = 1;
  for (const BitMove* move = moves; move < moves + count; ++move) widest = move->source_stride > widest ? move->source_stride : widest;
  const std::size_t tile = kMoveTile / widest + 1;
  for (std::size_t start = 0; start < records; start += tile) {
    const std::size_t n = min_of(tile, records - start);
    for (std::size_t k = 0; k < count; ++k) {
      const BitMove& move = moves[k];
      const Byte* const from = in + start * move.source_stride;
      Byte* const to = out + start * move.target_stride;
      if (move.bits != BitSide::none)
        move_single_bits(move, from, to, n);
      else if (move.count == 1)
        move_field<1>(move, from, to, n);
      else if (move.count == 16)
        move_field<16>(move, from, to, n);
      else if (move.count == 32)
        move_field<32>(move, from, to, n);
      else
        move_field<0>(move, from, to, n);
    }
  }
}

}  // namespace ingot::INGOT_ISA
