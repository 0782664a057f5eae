// The tiling of the merge of two attention partials: which rows a core takes, in tiles that fit its unified buffer.
// Plain C++ without CANN headers; the host computes it, the kernel receives it by value.
#pragma once

#include "split.h"

namespace hp_cann {

// Rows come in groups whose lse is contiguous; within a group, rows of `out` lie `inner` rows apart.
//
// out [batch, seq, heads, dim] with lse [batch, heads, seq] has batch * heads groups of seq rows, `inner` = heads;
// where both have the same order there is one group of all rows, `inner` = 1.
struct LseMergeTiling {
  std::uint64_t groups = 0;
  std::uint64_t rows_per_group = 0;
  std::uint64_t inner = 1;
  std::uint64_t tiles_per_group = 0;
  std::uint32_t tile_rows = 0;
  std::uint32_t dim = 0;
  std::uint32_t dim_tile = 0;    // elements of a row that are held at once
  std::uint32_t row_elements = 0;  // dim_tile, rounded up to whole blocks: the distance of rows in the buffer
  std::uint32_t unified_bytes = 0;  // of the buffer, in use
  Split split;
};

// Where the rows of a tile lie: `row` and `lse` count rows, from the start of the tensors.
struct LseMergeTile {
  std::uint64_t row = 0;
  std::uint64_t lse = 0;
  std::uint32_t rows = 0;
};

// Bytes of the unified buffer for tiles of `rows` rows: queues are double, for the next tile arrives while one is computed.
inline std::uint64_t lse_merge_bytes(std::uint64_t rows, std::uint64_t row_elements, std::uint64_t item_bytes) {
  const std::uint64_t wide = item_bytes == 4 ? 0 : 2 * rows * row_elements * 4;  // both partials in float32
  const std::uint64_t queues = 3 * 2 * rows * row_elements * item_bytes;         // two partials in, one out
  const std::uint64_t lse = round_up(rows * 4, kBlockBytes);
  return queues + wide + (2 * 2 + 2) * lse + 4 * lse;  // lse in and out, double; maximum, sum, two weights
}

// False where the shapes can't be tiled: no rows or columns, or strides beyond what a transfer can express.
//
// `outer`, `middle`, `inner`: the three leading sizes of out; `swapped`: whether lse has the last two of them in the other order.
// `item_bytes`: 2 or 4; `unified_bytes`: size of the unified buffer of a core.
inline bool lse_merge_tiling(std::uint64_t outer, std::uint64_t middle, std::uint64_t inner, bool swapped, std::uint64_t dim,
                             std::uint64_t item_bytes, std::uint32_t cores, std::uint64_t unified_bytes,
                             LseMergeTiling& tiling) {
  tiling = LseMergeTiling{};
  if (outer == 0 || middle == 0 || inner == 0 || dim == 0 || cores == 0 || dim > 0xFFFFFFFFull) return false;
  if (item_bytes != 2 && item_bytes != 4) return false;
  tiling.groups = swapped ? outer * inner : 1;
  tiling.rows_per_group = swapped ? middle : outer * middle * inner;
  tiling.inner = swapped ? inner : 1;
  tiling.dim = static_cast<std::uint32_t>(dim);
  const std::uint64_t unit = kBlockBytes / item_bytes;
  // As much of a row as fits beside the vectors of one row; whole rows in all but extreme cases.
  std::uint64_t row_elements = round_up(dim, unit);
  while (row_elements > unit && (lse_merge_bytes(1, row_elements, item_bytes) > unified_bytes || row_elements * item_bytes > kMaxBlockBytes)) {
    row_elements = round_up(row_elements / 2, unit);
  }
  if (lse_merge_bytes(1, row_elements, item_bytes) > unified_bytes) return false;
  tiling.row_elements = static_cast<std::uint32_t>(row_elements);
  tiling.dim_tile = static_cast<std::uint32_t>(smaller(dim, row_elements));
  if ((dim * tiling.inner - 1) * item_bytes > kMaxStrideBytes) return false;
  std::uint64_t rows = smaller(tiling.rows_per_group, kMaxBlocks);
  // The size is not linear in the rows, for the vectors of lse are rounded up; a bisection finds the most that fit.
  std::uint64_t fits = 1, beyond = rows + 1;
  while (beyond - fits > 1) {
    const std::uint64_t half = (fits + beyond) / 2;
    (lse_merge_bytes(half, row_elements, item_bytes) <= unified_bytes ? fits : beyond) = half;
  }
  // Small inputs are cut finer, until every core has a tile.
  const std::uint64_t per_core = divide_up(tiling.groups * tiling.rows_per_group, cores);
  rows = smaller(fits, per_core);
  tiling.tile_rows = static_cast<std::uint32_t>(rows);
  tiling.tiles_per_group = divide_up(tiling.rows_per_group, rows);
  tiling.split = split_tiles(tiling.groups * tiling.tiles_per_group, cores);
  tiling.unified_bytes = static_cast<std::uint32_t>(lse_merge_bytes(rows, row_elements, item_bytes));
  return true;
}

}  // namespace hp_cann
