// The tiling of dispatch (rows to their experts) and combine (weighted sum back): which tokens a core takes, in what tiles.
// Plain C++ without CANN headers; the host computes it, the kernel receives it by value.
#pragma once

#include "split.h"

namespace hp_cann {

struct PermuteTiling {
  std::uint64_t tokens = 0;
  std::uint32_t top_k = 0;
  std::uint32_t dim = 0;
  std::uint32_t dim_tile = 0;      // elements of a row that are held at once
  std::uint32_t row_elements = 0;  // dim_tile, rounded up to whole blocks
  std::uint32_t tile_tokens = 0;   // tokens whose rows' numbers (and weights) are loaded at once
  std::uint32_t weighted = 0;      // combine: whether there are weights
  std::uint32_t unified_bytes = 0;
  Split split;                     // of tiles of tokens
};

// dispatch holds two rows in flight; combine two in, two out, and in float32 the sum and one row.
inline std::uint64_t permute_row_bytes(std::uint64_t row_elements, std::uint64_t item_bytes, bool combine) {
  return combine ? 4 * row_elements * item_bytes + 2 * row_elements * 4 : 2 * row_elements * item_bytes;
}

// Numbers of rows (int32) and weights (float32) of a tile of tokens, each double.
inline std::uint64_t permute_index_bytes(std::uint64_t tile_tokens, std::uint64_t top_k, bool weighted) {
  return (weighted ? 2 : 1) * 2 * round_up(tile_tokens * top_k * 4, kBlockBytes);
}

// False where the shapes can't be tiled.
//
// `item_bytes`: 2 or 4; `combine`: which of the two kernels; `unified_bytes`: size of the unified buffer of a core.
inline bool permute_tiling(std::uint64_t tokens, std::uint64_t top_k, std::uint64_t dim, std::uint64_t item_bytes, bool combine,
                           bool weighted, std::uint32_t cores, std::uint64_t unified_bytes, PermuteTiling& tiling) {
  tiling = PermuteTiling{};
  if (tokens == 0 || top_k == 0 || dim == 0 || cores == 0 || dim > 0xFFFFFFFFull || top_k > 0xFFFFull) return false;
  if (item_bytes != 2 && item_bytes != 4) return false;
  if (tokens > 0x7FFFFFFFull / top_k) return false;  // numbers of rows are int32 on the device
  const std::uint64_t unit = kBlockBytes / item_bytes;
  // Room for the rows' numbers of at least one token comes first.
  const std::uint64_t least = permute_index_bytes(1, top_k, weighted);
  if (least >= unified_bytes) return false;
  std::uint64_t row_elements = round_up(dim, unit);
  while (row_elements > unit && (permute_row_bytes(row_elements, item_bytes, combine) > unified_bytes - least ||
                                   row_elements * item_bytes > kMaxBlockBytes)) {
    row_elements = round_up(row_elements / 2, unit);
  }
  const std::uint64_t row_bytes = permute_row_bytes(row_elements, item_bytes, combine);
  if (row_bytes > unified_bytes - least) return false;
  const std::uint64_t per_core = divide_up(tokens, cores);
  // A transfer of numbers is one block of at most kMaxBlockBytes, far beyond what fits.
  std::uint64_t fits = 1, beyond = per_core + 1;
  while (beyond - fits > 1) {
    const std::uint64_t half = (fits + beyond) / 2;
    (permute_index_bytes(half, top_k, weighted) <= unified_bytes - row_bytes ? fits : beyond) = half;
  }
  tiling.tokens = tokens;
  tiling.top_k = static_cast<std::uint32_t>(top_k);
  tiling.dim = static_cast<std::uint32_t>(dim);
  tiling.dim_tile = static_cast<std::uint32_t>(smaller(dim, row_elements));
  tiling.row_elements = static_cast<std::uint32_t>(row_elements);
  tiling.tile_tokens = static_cast<std::uint32_t>(fits);
  tiling.weighted = weighted ? 1 : 0;
  tiling.split = split_tiles(divide_up(tokens, fits), cores);
  tiling.unified_bytes = static_cast<std::uint32_t>(row_bytes + permute_index_bytes(fits, top_k, weighted));
  return true;
}

}  // namespace hp_cann
