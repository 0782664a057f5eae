// What the host does for a kernel: compute the tiling, choose the kernel for the element type, launch it. The same code runs in
// front of an NPU (launch.cpp) and of the shim (shim/run.cpp), which define, before they include it:
//   HP_LAUNCH(kernel, cores, stream, tiling, arguments...), device_cores() and device_unified_bytes().
#pragma once

#include <cstdint>

#include "../tiling/lse_merge_tiling.h"
#include "../tiling/permute_tiling.h"
#include "codes.h"

namespace hp_cann {

inline std::uint64_t item_bytes(int type) { return type == kFloat32 ? 4 : 2; }

}  // namespace hp_cann

#define HP_EXPORT extern "C" __attribute__((visibility("default")))

// out and lse of two partials [outer, middle, inner, dim]; the last two dims of lse are swapped or not.
HP_EXPORT int hp_cann_lse_merge(void* stream, int type, void* out_a, void* lse_a, void* out_b, void* lse_b, void* out, void* lse,
                                std::uint64_t outer, std::uint64_t middle, std::uint64_t inner, int swapped, std::uint64_t dim) {
  using namespace hp_cann;
  if (type != kFloat32 && type != kFloat16 && type != kBfloat16) return kUnknownType;
  LseMergeTiling tiling;
  if (!lse_merge_tiling(outer, middle, inner, swapped != 0, dim, item_bytes(type), device_cores(), device_unified_bytes(), tiling)) {
    return kCannotTile;
  }
  if (type == kFloat32) return HP_LAUNCH(hp_lse_merge_float32, tiling.split.cores, stream, tiling, out_a, lse_a, out_b, lse_b, out, lse);
  if (type == kFloat16) return HP_LAUNCH(hp_lse_merge_float16, tiling.split.cores, stream, tiling, out_a, lse_a, out_b, lse_b, out, lse);
  return HP_LAUNCH(hp_lse_merge_bfloat16, tiling.split.cores, stream, tiling, out_a, lse_a, out_b, lse_b, out, lse);
}

// permuted[rows[token, k]] = tokens[token]; rows are int32.
HP_EXPORT int hp_cann_moe_dispatch(void* stream, int type, void* token_rows, void* rows, void* permuted, std::uint64_t tokens,
                                   std::uint64_t top_k, std::uint64_t dim) {
  using namespace hp_cann;
  if (type != kFloat32 && type != kFloat16 && type != kBfloat16) return kUnknownType;
  PermuteTiling tiling;
  if (!permute_tiling(tokens, top_k, dim, item_bytes(type), false, false, device_cores(), device_unified_bytes(), tiling)) {
    return kCannotTile;
  }
  if (type == kFloat32) return HP_LAUNCH(hp_moe_dispatch_32, tiling.split.cores, stream, tiling, token_rows, rows, permuted);
  return HP_LAUNCH(hp_moe_dispatch_16, tiling.split.cores, stream, tiling, token_rows, rows, permuted);
}

// out[token] = sum over k of weights[token, k] * permuted[rows[token, k]]; rows are int32, weights float32 or null.
HP_EXPORT int hp_cann_moe_combine(void* stream, int type, void* permuted, void* rows, void* weights, void* out, std::uint64_t tokens,
                                  std::uint64_t top_k, std::uint64_t dim) {
  using namespace hp_cann;
  if (type != kFloat32 && type != kFloat16 && type != kBfloat16) return kUnknownType;
  PermuteTiling tiling;
  if (!permute_tiling(tokens, top_k, dim, item_bytes(type), true, weights != nullptr, device_cores(), device_unified_bytes(), tiling)) {
    return kCannotTile;
  }
  if (type == kFloat32) return HP_LAUNCH(hp_moe_combine_float32, tiling.split.cores, stream, tiling, permuted, rows, weights, out);
  if (type == kFloat16) return HP_LAUNCH(hp_moe_combine_float16, tiling.split.cores, stream, tiling, permuted, rows, weights, out);
  return HP_LAUNCH(hp_moe_combine_bfloat16, tiling.split.cores, stream, tiling, permuted, rows, weights, out);
}
