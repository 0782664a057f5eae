// Dispatch of tokens to the rows of their experts, and the weighted sum back, on the vector cores of an Ascend NPU.
// Runs in continuous integration on a CPU, through shim/; it has not run on an NPU.
#include "kernel_operator.h"

#include "../tiling/permute_tiling.h"

using namespace AscendC;

namespace hp_cann {

constexpr int32_t kTwo = 2;

// The tokens of this core, and the rows' numbers (and weights) of one tile of them: what both kernels do alike.
class TokenTiles {
 public:
  __aicore__ inline void init(TPipe& pipe_, GM_ADDR rows, GM_ADDR weights, const PermuteTiling& given) {
    pipe = &pipe_;
    tiling = given;
    const uint64_t slots = tiling.tokens * tiling.top_k;
    const uint32_t bytes = static_cast<uint32_t>(round_up(tiling.tile_tokens * tiling.top_k * 4, kBlockBytes));
    rows_gm.SetGlobalBuffer((__gm__ int32_t*)rows, slots);
    pipe->InitBuffer(rows_queue, kTwo, bytes);
    if (tiling.weighted) {
      weights_gm.SetGlobalBuffer((__gm__ float*)weights, slots);
      pipe->InitBuffer(weights_queue, kTwo, bytes);
    }
    const uint64_t core = GetBlockIdx();
    const Split& split = tiling.split;
    next = core * split.tiles_per_core + (core < split.longer ? core : split.longer);
    end = core < split.cores ? next + split.tiles_per_core + (core < split.longer ? 1 : 0) : next;
  }

  // Loads the next tile; false after the last.
  __aicore__ inline bool advance() {
    if (next >= end) return false;
    first = next++ * tiling.tile_tokens;
    const uint64_t left = tiling.tokens - first;
    count = left < tiling.tile_tokens ? static_cast<uint32_t>(left) : tiling.tile_tokens;
    const DataCopyExtParams shape{1, static_cast<uint32_t>(count * tiling.top_k * 4), 0, 0, 0};
    LocalTensor<int32_t> loaded = rows_queue.template AllocTensor<int32_t>();
    DataCopyPad(loaded, rows_gm[first * tiling.top_k], shape, DataCopyPadExtParams<int32_t>{false, 0, 0, 0});
    rows_queue.EnQue(loaded);
    rows = rows_queue.template DeQue<int32_t>();
    if (tiling.weighted) {
      LocalTensor<float> loaded_weights = weights_queue.template AllocTensor<float>();
      DataCopyPad(loaded_weights, weights_gm[first * tiling.top_k], shape, DataCopyPadExtParams<float>{false, 0, 0, 0});
      weights_queue.EnQue(loaded_weights);
      weights = weights_queue.template DeQue<float>();
    }
    // The scalar unit reads them, which the queues' own synchronisation (with the vector unit) doesn't cover.
    const event_t event = static_cast<event_t>(pipe->FetchEventID(HardEvent::MTE2_S));
    SetFlag<HardEvent::MTE2_S>(event);
    WaitFlag<HardEvent::MTE2_S>(event);
    return true;
  }

  __aicore__ inline void release() {
    rows_queue.FreeTensor(rows);
    if (tiling.weighted) weights_queue.FreeTensor(weights);
  }

  uint64_t first = 0;
  uint32_t count = 0;
  LocalTensor<int32_t> rows;
  LocalTensor<float> weights;

 private:
  TPipe* pipe = nullptr;
  PermuteTiling tiling;
  uint64_t next = 0, end = 0;
  TQue<QuePosition::VECIN, kTwo> rows_queue, weights_queue;
  GlobalTensor<int32_t> rows_gm;
  GlobalTensor<float> weights_gm;
};

// permuted[rows[token, k]] = tokens[token]; U is an unsigned integer as wide as an element.
template <typename U>
class Dispatch {
 public:
  __aicore__ inline void init(GM_ADDR tokens, GM_ADDR rows, GM_ADDR permuted, const PermuteTiling& given) {
    tiling = given;
    tokens_gm.SetGlobalBuffer((__gm__ U*)tokens, tiling.tokens * tiling.dim);
    permuted_gm.SetGlobalBuffer((__gm__ U*)permuted, tiling.tokens * tiling.top_k * tiling.dim);
    pipe.InitBuffer(row_queue, kTwo, static_cast<uint32_t>(tiling.row_elements * sizeof(U)));
    tiles.init(pipe, rows, nullptr, tiling);
  }

  __aicore__ inline void process() {
    while (tiles.advance()) {
      for (uint32_t token = 0; token < tiles.count; ++token) {
        for (uint32_t column = 0; column < tiling.dim; column += tiling.dim_tile) copy(token, column);
      }
      tiles.release();
    }
  }

 private:
  // Read once, written top_k times.
  __aicore__ inline void copy(uint32_t token, uint32_t column) {
    const uint32_t left = tiling.dim - column;
    const uint32_t columns = left < tiling.dim_tile ? left : tiling.dim_tile;
    const DataCopyExtParams shape{1, static_cast<uint32_t>(columns * sizeof(U)), 0, 0, 0};
    LocalTensor<U> row = row_queue.template AllocTensor<U>();
    DataCopyPad(row, tokens_gm[(tiles.first + token) * tiling.dim + column], shape, DataCopyPadExtParams<U>{false, 0, 0, 0});
    row_queue.EnQue(row);
    LocalTensor<U> ready = row_queue.template DeQue<U>();
    for (uint32_t k = 0; k < tiling.top_k; ++k) {
      const uint64_t target = static_cast<uint64_t>(tiles.rows.GetValue(token * tiling.top_k + k));
      DataCopyPad(permuted_gm[target * tiling.dim + column], ready, shape);
    }
    row_queue.FreeTensor(ready);
  }

  TPipe pipe;
  TQueBind<QuePosition::VECIN, QuePosition::VECOUT, kTwo> row_queue;
  GlobalTensor<U> tokens_gm, permuted_gm;
  PermuteTiling tiling;
  TokenTiles tiles;
};

// out[token] = sum over k, in order, of weights[token, k] * permuted[rows[token, k]], in float32, rounded once.
template <typename T>
class Combine {
 public:
  __aicore__ inline void init(GM_ADDR permuted, GM_ADDR rows, GM_ADDR weights, GM_ADDR out, const PermuteTiling& given) {
    tiling = given;
    permuted_gm.SetGlobalBuffer((__gm__ T*)permuted, tiling.tokens * tiling.top_k * tiling.dim);
    out_gm.SetGlobalBuffer((__gm__ T*)out, tiling.tokens * tiling.dim);
    pipe.InitBuffer(row_queue, kTwo, static_cast<uint32_t>(tiling.row_elements * sizeof(T)));
    pipe.InitBuffer(out_queue, kTwo, static_cast<uint32_t>(tiling.row_elements * sizeof(T)));
    pipe.InitBuffer(sum_buffer, static_cast<uint32_t>(tiling.row_elements * sizeof(float)));
    pipe.InitBuffer(wide_buffer, static_cast<uint32_t>(tiling.row_elements * sizeof(float)));
    tiles.init(pipe, rows, weights, tiling);
  }

  __aicore__ inline void process() {
    while (tiles.advance()) {
      for (uint32_t token = 0; token < tiles.count; ++token) {
        for (uint32_t column = 0; column < tiling.dim; column += tiling.dim_tile) sum_up(token, column);
      }
      tiles.release();
    }
  }

 private:
  __aicore__ inline void load(uint32_t slot, uint32_t column, const DataCopyExtParams& shape) {
    LocalTensor<T> row = row_queue.template AllocTensor<T>();
    const uint64_t source = static_cast<uint64_t>(tiles.rows.GetValue(slot));
    DataCopyPad(row, permuted_gm[source * tiling.dim + column], shape, DataCopyPadExtParams<T>{false, 0, 0, T(0)});
    row_queue.EnQue(row);
  }

  __aicore__ inline void sum_up(uint32_t token, uint32_t column) {
    const uint32_t left = tiling.dim - column;
    const uint32_t columns = left < tiling.dim_tile ? left : tiling.dim_tile;
    const int32_t elements = static_cast<int32_t>(tiling.row_elements);
    const DataCopyExtParams shape{1, static_cast<uint32_t>(columns * sizeof(T)), 0, 0, 0};
    LocalTensor<float> sum = sum_buffer.template Get<float>();
    const uint32_t slot = token * tiling.top_k;
    load(slot, column, shape);
    for (uint32_t k = 0; k < tiling.top_k; ++k) {
      // The next row travels while this one is added.
      if (k + 1 < tiling.top_k) load(slot + k + 1, column, shape);
      LocalTensor<T> row = row_queue.template DeQue<T>();
      LocalTensor<float> term = k == 0 ? sum : wide_buffer.template Get<float>();
      if constexpr (sizeof(T) == sizeof(float)) {
        Muls(term, row, 1.0f, elements);
      } else {
        Cast(term, row, RoundMode::CAST_NONE, elements);
      }
      if (tiling.weighted) Muls(term, term, tiles.weights.GetValue(slot + k), elements);
      if (k > 0) Add(sum, sum, term, elements);
      row_queue.FreeTensor(row);
    }
    LocalTensor<T> result = out_queue.template AllocTensor<T>();
    if constexpr (sizeof(T) == sizeof(float)) {
      Muls(result, sum, 1.0f, elements);
    } else {
      Cast(result, sum, RoundMode::CAST_RINT, elements);
    }
    out_queue.EnQue(result);
    LocalTensor<T> ready = out_queue.template DeQue<T>();
    DataCopyPad(out_gm[(tiles.first + token) * tiling.dim + column], ready, shape);
    out_queue.FreeTensor(ready);
  }

  TPipe pipe;
  TQue<QuePosition::VECIN, kTwo> row_queue;
  TQue<QuePosition::VECOUT, kTwo> out_queue;
  TBuf<QuePosition::VECCALC> sum_buffer, wide_buffer;
  GlobalTensor<T> permuted_gm, out_gm;
  PermuteTiling tiling;
  TokenTiles tiles;
};

template <typename U>
__aicore__ inline void run_dispatch(GM_ADDR tokens, GM_ADDR rows, GM_ADDR permuted, const PermuteTiling& tiling) {
  Dispatch<U> kernel;
  kernel.init(tokens, rows, permuted, tiling);
  kernel.process();
}

template <typename T>
__aicore__ inline void run_combine(GM_ADDR permuted, GM_ADDR rows, GM_ADDR weights, GM_ADDR out, const PermuteTiling& tiling) {
  Combine<T> kernel;
  kernel.init(permuted, rows, weights, out, tiling);
  kernel.process();
}

}  // namespace hp_cann

extern "C" __global__ __aicore__ void hp_moe_dispatch_16(GM_ADDR tokens, GM_ADDR rows, GM_ADDR permuted, hp_cann::PermuteTiling tiling) {
  hp_cann::run_dispatch<uint16_t>(tokens, rows, permuted, tiling);
}

extern "C" __global__ __aicore__ void hp_moe_dispatch_32(GM_ADDR tokens, GM_ADDR rows, GM_ADDR permuted, hp_cann::PermuteTiling tiling) {
  hp_cann::run_dispatch<uint32_t>(tokens, rows, permuted, tiling);
}

extern "C" __global__ __aicore__ void hp_moe_combine_float32(GM_ADDR permuted, GM_ADDR rows, GM_ADDR weights, GM_ADDR out,
                                                             hp_cann::PermuteTiling tiling) {
  hp_cann::run_combine<float>(permuted, rows, weights, out, tiling);
}

extern "C" __global__ __aicore__ void hp_moe_combine_float16(GM_ADDR permuted, GM_ADDR rows, GM_ADDR weights, GM_ADDR out,
                                                             hp_cann::PermuteTiling tiling) {
  hp_cann::run_combine<half>(permuted, rows, weights, out, tiling);
}

extern "C" __global__ __aicore__ void hp_moe_combine_bfloat16(GM_ADDR permuted, GM_ADDR rows, GM_ADDR weights, GM_ADDR out,
                                                              hp_cann::PermuteTiling tiling) {
  hp_cann::run_combine<bfloat16_t>(permuted, rows, weights, out, tiling);
}
