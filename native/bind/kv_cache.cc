#include "kernels/kv_cache.h"

#include <algorithm>

#include "bind/arrays.h"
#include "core/dispatch.h"
#include "core/pool.h"

namespace {

using ingot::KvBlocks;

using Halves = nb::ndarray<const std::uint16_t, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const std::uint8_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using OutRows = Written<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

constexpr std::size_t kTaskBlocks = 8;                // of a head, per task
constexpr std::size_t kSmall = std::size_t{1} << 16;  // minimum of bytes of codes times rows for a second thread
constexpr std::size_t kMostRows = std::size_t{1} << 24;

// Blocks of `cols` columns in groups of `group`; the arrays determine the other sizes.
KvBlocks blocks_of(const Codes& packed, const Halves& scales, const Halves& zeros, std::size_t count, int bits,
                   std::size_t cols, std::size_t group) {
  require(bits == 2 || bits == 4 || bits == 8, "expected 2, 4 or 8 bits");
  const std::size_t capacity = packed.shape(1), rows = packed.shape(2), row_bytes = packed.shape(3);
  require(rows <= ingot::kKvMost && cols <= ingot::kKvMost, "expected blocks of at most 1024 rows and columns");
  require(cols % ingot::kKvLanes == 0 && group && group % ingot::kKvLanes == 0, "expected columns and groups in sixteens");
  require(row_bytes == cols * static_cast<std::size_t>(bits) / 8, "expected rows of cols * bits / 8 bytes");
  require(count <= capacity, "expected no more blocks than there is room for");
  const std::size_t groups = (cols + group - 1) / group;
  require(row_bytes == 0 || scales.size() == packed.size() / row_bytes * groups, "expected one scale per group");
  require(zeros.size() == scales.size(), "expected one zero per scale");
  return {packed.data(), scales.data(), zeros.data(), capacity, count, rows, cols, group, groups, row_bytes, bits};
}

struct Job {
  KvBlocks blocks;
  const float* x;
  float* out;
  std::size_t count, stride, parts;  // rows of x; of the scores; tasks of a head
};

std::size_t threads_for(const Job& job, std::size_t heads, std::size_t threads) {
  const std::size_t bytes = heads * job.blocks.count * job.blocks.rows * job.blocks.row_bytes;
  return bytes * std::max<std::size_t>(job.count, 1) <= kSmall ? 1 : std::clamp<std::size_t>(threads, 1, 256);
}

void score(void* context, std::size_t index) {
  const Job& job = *static_cast<const Job*>(context);
  const std::size_t first = index % job.parts * kTaskBlocks, last = std::min(first + kTaskBlocks, job.blocks.count);
  INGOT_KERNEL(kv_scores)(job.blocks, job.x, job.count, index / job.parts, first, last, job.out, job.stride);
}

void mix(void* context, std::size_t index) {
  const Job& job = *static_cast<const Job*>(context);
  INGOT_KERNEL(kv_values)(job.blocks, job.x, job.stride, job.count, index / job.parts, index % job.parts, job.out);
}

void scores(const Rows& queries, const Codes& packed, const Halves& scales, const Halves& zeros, std::size_t blocks,
            int bits, const OutRows& out, std::size_t first, std::size_t threads) {
  require(bits > 0, "expected 2, 4 or 8 bits");
  const std::size_t heads = packed.shape(0), cols = packed.shape(3) * 8 / static_cast<std::size_t>(bits);
  const KvBlocks kv =
      blocks_of(packed, scales, zeros, blocks, bits, cols, std::max<std::size_t>(cols, ingot::kKvLanes));
  require(queries.shape(0) == heads && queries.shape(2) == kv.rows, "expected queries [heads, rows, channels]");
  require(queries.shape(1) <= kMostRows && out.shape(0) == heads && out.shape(1) == queries.shape(1),
          "expected scores [heads, rows, tokens]");
  const std::size_t total = out.shape(2);
  require(first <= total && blocks * cols <= total - first, "expected room for the scores of all blocks");
  if (blocks == 0 || heads == 0) return;
  Job job{kv, queries.data(), out.data() + first, queries.shape(1), total, (blocks + kTaskBlocks - 1) / kTaskBlocks};
  nb::gil_scoped_release release;
  ingot::run_tasks(heads * job.parts, threads_for(job, heads, threads), &score, &job);
}

void values(const Rows& weights, std::size_t first, const Codes& packed, const Halves& scales, const Halves& zeros,
            std::size_t blocks, int bits, std::size_t group, const OutRows& out, std::size_t threads) {
  const std::size_t heads = packed.shape(0);
  const KvBlocks kv = blocks_of(packed, scales, zeros, blocks, bits, out.shape(2), group);
  const std::size_t total = weights.shape(2);
  require(weights.shape(0) == heads && weights.shape(1) <= kMostRows, "expected weights [heads, rows, tokens]");
  require(first <= total && blocks * kv.rows <= total - first, "expected a weight for every token of the blocks");
  require(out.shape(0) == heads && out.shape(1) == weights.shape(1), "expected an output [heads, rows, width]");
  if (blocks == 0 || heads == 0 || kv.groups == 0) {
    std::fill_n(out.data(), out.size(), 0.0f);
    return;
  }
  Job job{kv, weights.data() + first, out.data(), weights.shape(1), total, kv.groups};
  nb::gil_scoped_release release;
  ingot::run_tasks(heads * job.parts, threads_for(job, heads, threads), &mix, &job);
}

}  // namespace

void bind_kv_cache(nb::module_& m) {
  define(m, "kv_scores", &scores, nb::arg("queries"), nb::arg("packed"), nb::arg("scales"), nb::arg("zeros"), nb::arg("blocks"),
        nb::arg("bits"), nb::arg("out"), nb::arg("first"), nb::arg("threads"),
        "Products of queries with the keys of packed blocks, rows of channels: scores of their tokens from column first on.");
  define(m, "kv_values", &values, nb::arg("weights"), nb::arg("first"), nb::arg("packed"), nb::arg("scales"), nb::arg("zeros"),
        nb::arg("blocks"), nb::arg("bits"), nb::arg("group"), nb::arg("out"), nb::arg("threads"),
        "Values of packed blocks, rows of tokens, summed by the weights from column first on.");
}
