// How work is cut for the cores of an accelerator: shared by the tilings of all kernels.
// Plain C++ without CANN headers, so that the same functions run in the host code of the NPU, in the tests, and under the shim.
#pragma once

#include <cstdint>

namespace hp_cann {

// The unit of every transfer and every vector instruction of the vector core, in bytes.
constexpr std::uint64_t kBlockBytes = 32;
// What one DataCopyPad carries at most (fields of the instruction): blocks, and bytes of a block.
constexpr std::uint64_t kMaxBlocks = 4095;
constexpr std::uint64_t kMaxBlockBytes = 2097151;
constexpr std::uint64_t kMaxStrideBytes = 0xFFFFFFFFull;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t unit) { return (value + unit - 1) / unit * unit; }
constexpr std::uint64_t divide_up(std::uint64_t value, std::uint64_t by) { return (value + by - 1) / by; }
constexpr std::uint64_t smaller(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

// `tiles` tiles over `cores` cores, the first `longer` of which take one more than the others.
struct Split {
  std::uint32_t cores = 0;
  std::uint32_t longer = 0;
  std::uint64_t tiles_per_core = 0;
};

// Never more cores than tiles, so that none is started for nothing.
inline Split split_tiles(std::uint64_t tiles, std::uint32_t cores) {
  Split split;
  split.cores = static_cast<std::uint32_t>(smaller(tiles, cores));
  if (split.cores > 0) {
    split.tiles_per_core = tiles / split.cores;
    split.longer = static_cast<std::uint32_t>(tiles % split.cores);
  }
  return split;
}

}  // namespace hp_cann
