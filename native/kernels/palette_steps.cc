// An iteration of Lloyd's on points in cells (spec/palette.md, "Vectors"): centroids that cannot be nearest anywhere in
// a cell are not tried for its points. If one centroid is left that all points already have, no point is read.
#include "kernels/gcc_headers.h"
#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "kernels/float_vectors.h"
#include "kernels/palette_cells.h"
#include "kernels/palette_tables.h"

namespace ingot::INGOT_ISA {
namespace {

constexpr std::size_t kMost = 256;

// Centroids for each of a register of boxes, ascending.
struct Lists {
  std::size_t count[kWidth] = {};
  std::uint8_t batch[kWidth][kMost];
};

template <int kSize>
class Step {
 public:
  Step(const PaletteCells& cells, const float* centroids, std::size_t k, const PaletteSteps& steps)
      : cells_(cells), centroids_(centroids), k_(k), steps_(steps), row_(cells.boxes_of_a_row()) {
    for (std::size_t c = 0; c < k; ++c) every_[c] = static_cast<std::uint8_t>(c);
  }

  // Parts `first` to `end`: a multiple of kPartsAtOnce, or all.
  void run(std::size_t first, std::size_t end) {
    for (std::size_t part = first; part < end; part += kWidth) {
      among(every_, k_, cells_.cells + part, of_parts_);
      for (std::size_t lane = 0; lane < std::min(kWidth, end - part); ++lane)
        run_part((part + lane) * kCellsOfPart, of_parts_.batch[lane], of_parts_.count[lane]);
    }
  }

 private:
  static constexpr auto kNumbers = static_cast<std::size_t>(kSize);

  void run_part(std::size_t first, const std::uint8_t* batch, std::size_t count) {
    if (cells_.starts[first] == cells_.starts[first + kCellsOfPart]) return;
    for (std::size_t cell = first; cell < first + kCellsOfPart; cell += kWidth) {
      if (count > 1) among(batch, count, cell, of_cells_);
      for (std::size_t lane = 0; lane < kWidth; ++lane) {
        if (count > 1)
          settle(cell + lane, of_cells_.batch[lane], of_cells_.count[lane]);
        else
          settle(cell + lane, batch, count);
      }
    }
  }

  // Lists the centroids that may be nearest in each of a register of boxes. A centroid is excluded if, at every corner,
  // the centroid nearest to the middle is nearer by more than the error of squared distances in f32. For both, the
  // square at a point is at most twice the square at the middle plus twice the square of half a diagonal.
  void among(const std::uint8_t* batch, std::size_t count, std::size_t box, Lists& lists) const {
    Floats middle[kNumbers], half[kNumbers], nearest[kNumbers], least = all(std::numeric_limits<float>::infinity()), room{};
    for (std::size_t v = 0; v < kNumbers; ++v) {
      middle[v] = load_floats(cells_.boxes + 2 * v * row_ + box);
      half[v] = load_floats(cells_.boxes + (2 * v + 1) * row_ + box);
      nearest[v] = Floats{};
      room += half[v] * half[v];
    }
    for (std::size_t i = 0; i < count; ++i) {
      const float* const c = centroids_ + batch[i] * kNumbers;
      const Floats square = squared(middle, c);
      const Ints nearer = square < least;
      for (std::size_t v = 0; v < kNumbers; ++v) nearest[v] = nearer ? all(c[v]) : nearest[v];
      least = smaller(square, least);
    }
    room = room * (4 * (kRoom - 1)) + kTiny;
    std::fill_n(lists.count, kWidth, 0);
    for (std::size_t i = 0; i < count; ++i) {
      const float* const c = centroids_ + batch[i] * kNumbers;
      const Floats square = squared(middle, c);
      Floats corner{};
      for (std::size_t v = 0; v < kNumbers; ++v) corner += half[v] * magnitude(c[v] - nearest[v]);
      const Floats amax = least - square + corner * (2 * kRoom) + (room + (least + square) * (2 * (kRoom - 1)));
      for (std::uint32_t pending = none_above(Floats{}, amax); pending; pending &= pending - 1) {
        const auto lane = static_cast<std::size_t>(std::countr_zero(pending));
        lists.batch[lane][lists.count[lane]++] = batch[i];
      }
    }
  }

  static Floats squared(const Floats* point, const float* centroid) {
    Floats distance{};
    for (std::size_t v = 0; v < kNumbers; ++v) {
      const Floats away = point[v] - centroid[v];
      distance = v ? distance + away * away : away * away;
    }
    return distance;
  }

  // Assigns the points of a cell to the nearest of some centroids; ties go to the first.
  void settle(std::size_t cell, const std::uint8_t* batch, std::size_t count) {
    const std::size_t from = cells_.starts[cell], to = cells_.starts[cell + 1];
    std::uint16_t& owner = steps_.owners[cell];
    if (from >= to || to > cells_.n || count == 0 || (count == 1 && owner == batch[0]))
      return;  // 0: centroids are NaN
    if (count == 1 && owner != kMixed) {
      pass_on(from, to, owner, batch[0]);
      owner = batch[0];
      return;
    }
    const bool fresh = owner >= k_ && owner != kMixed;
    for (std::size_t i = from; i < to; i += kWidth) {
      Floats point[kNumbers], least = all(std::numeric_limits<float>::infinity());
      for (std::size_t v = 0; v < kNumbers; ++v) point[v] = load_floats(cells_.columns + v * cells_.stride() + i);
      Ints which = Ints{} + batch[0];
      for (std::size_t j = 0; j < count; ++j) {
        const Floats distance = squared(point, centroids_ + batch[j] * kNumbers);
        which = distance < least ? Ints{} + batch[j] : which;
        least = smaller(distance, least);
      }
      change(i, std::min(kWidth, to - i), which, fresh);
    }
    owner = count == 1 ? batch[0] : kMixed;
  }

  // Moves all points of a cell from one centroid, if any, to another.
  void pass_on(std::size_t from, std::size_t to, std::uint16_t before, std::uint8_t after) {
    for (std::size_t v = 0; v < kNumbers; ++v) {
      const float* const column = cells_.columns + v * cells_.stride();
      double batch[8] = {}, sum = 0;
      std::size_t i = from;
      for (; i + 8 <= to; i += 8)
        for (std::size_t lane = 0; lane < 8; ++lane) batch[lane] += static_cast<double>(column[i + lane]);
      for (; i < to; ++i) sum += static_cast<double>(column[i]);
      for (const double item : batch) sum += item;
      if (before < k_) steps_.sums[before * kNumbers + v] -= sum;
      steps_.sums[after * kNumbers + v] += sum;
    }
    const auto count = static_cast<double>(to - from);
    if (before < k_) steps_.counts[before] -= count;
    steps_.counts[after] += count;
    std::fill(steps_.codes + from, steps_.codes + to, after);
  }

  void change(std::size_t from, std::size_t count, Ints which, bool fresh) {
    alignas(kVectorBytes) std::int32_t after[kWidth];
    std::memcpy(after, &which, sizeof after);
    std::uint8_t* const codes = steps_.codes + from;
    std::uint32_t other = fresh ? (1U << count) - 1 : differing(codes, count, which);
    for (; other; other &= other - 1) {
      const auto lane = static_cast<std::size_t>(std::countr_zero(other));
      const auto to = static_cast<std::size_t>(after[lane]);
      if (!fresh && codes[lane] < k_) this->count<-1>(from + lane, codes[lane]);
      this->count<1>(from + lane, to);
      codes[lane] = static_cast<std::uint8_t>(to);
    }
  }

  // A bit for each of `count` points whose code is another.
  static std::uint32_t differing(const std::uint8_t* codes, std::size_t count, Ints which) {
#if defined(__AVX512F__)
    const auto batch = static_cast<__mmask16>((1U << count) - 1);
    const __m512i before = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(batch, codes));
    return _mm512_mask_cmpneq_epi32_mask(batch, before, reinterpret_cast<__m512i>(which));
#else
    std::uint32_t other = 0;
    for (std::size_t lane = 0; lane < count; ++lane) other |= static_cast<std::uint32_t>(codes[lane] != which[lane]) << lane;
    return other;
#endif
  }

  // Adds a point to its centroid's sum, or subtracts it.
  template <int kSign>
  void count(std::size_t point, std::size_t code) {
    for (std::size_t v = 0; v < kNumbers; ++v)
      steps_.sums[code * kNumbers + v] += kSign * static_cast<double>(cells_.columns[v * cells_.stride() + point]);
    steps_.counts[code] += kSign;
  }

  const PaletteCells& cells_;
  const float* centroids_;
  std::size_t k_;
  const PaletteSteps& steps_;
  std::size_t row_;
  std::uint8_t every_[kMost];
  Lists of_parts_, of_cells_;
};

}  // namespace

void palette_step(const PaletteCells& cells, std::size_t first, std::size_t end, const float* centroids, std::size_t k,
                  const PaletteSteps& steps) {
  if (cells.size == 2)
    Step<2>(cells, centroids, k, steps).run(first, end);
  else
    Step<4>(cells, centroids, k, steps).run(first, end);
}

}  // namespace ingot::INGOT_ISA
