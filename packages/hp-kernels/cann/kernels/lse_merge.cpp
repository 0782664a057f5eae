// Merge of two attention partials on the vector cores of an Ascend NPU: out and lse of the union of their keys.
// Runs in continuous integration on a CPU, through shim/; it has not run on an NPU.
#include "kernel_operator.h"

#include "../tiling/lse_merge_tiling.h"

using namespace AscendC;

namespace hp_cann {

constexpr int32_t kDouble = 2;
constexpr float kLowest = -3.402823466e38f;
constexpr float kTiny = 1e-30f;

template <typename T>
class LseMerge {
 public:
  __aicore__ inline void init(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b, GM_ADDR out, GM_ADDR lse,
                                const LseMergeTiling& given) {
    tiling = given;
    const uint64_t rows = tiling.groups * tiling.rows_per_group;
    in_gm[0].SetGlobalBuffer((__gm__ T*)out_a, rows * tiling.dim);
    in_gm[1].SetGlobalBuffer((__gm__ T*)out_b, rows * tiling.dim);
    out_gm.SetGlobalBuffer((__gm__ T*)out, rows * tiling.dim);
    lse_in_gm[0].SetGlobalBuffer((__gm__ float*)lse_a, rows);
    lse_in_gm[1].SetGlobalBuffer((__gm__ float*)lse_b, rows);
    lse_gm.SetGlobalBuffer((__gm__ float*)lse, rows);

    const uint32_t tile_bytes = tiling.tile_rows * tiling.row_elements * sizeof(T);
    const uint32_t lse_bytes = static_cast<uint32_t>(round_up(tiling.tile_rows * 4, kBlockBytes));
    pipe.InitBuffer(rows_a, kDouble, tile_bytes);
    pipe.InitBuffer(rows_b, kDouble, tile_bytes);
    pipe.InitBuffer(rows_out, kDouble, tile_bytes);
    pipe.InitBuffer(queue_lse_a, kDouble, lse_bytes);
    pipe.InitBuffer(queue_lse_b, kDouble, lse_bytes);
    pipe.InitBuffer(queue_lse, kDouble, lse_bytes);
    pipe.InitBuffer(high_buffer, lse_bytes);
    pipe.InitBuffer(sum_buffer, lse_bytes);
    pipe.InitBuffer(weight_a_buffer, lse_bytes);
    pipe.InitBuffer(weight_b_buffer, lse_bytes);
    if (sizeof(T) != sizeof(float)) {
      pipe.InitBuffer(wide_a_buffer, tiling.tile_rows * tiling.row_elements * sizeof(float));
      pipe.InitBuffer(wide_b_buffer, tiling.tile_rows * tiling.row_elements * sizeof(float));
    }
  }

  __aicore__ inline void process() {
    const uint64_t core = GetBlockIdx();
    const Split& split = tiling.split;
    if (core >= split.cores) return;
    const uint64_t first = core * split.tiles_per_core + (core < split.longer ? core : split.longer);
    const uint64_t count = split.tiles_per_core + (core < split.longer ? 1 : 0);
    for (uint64_t tile = first; tile < first + count; ++tile) {
      LseMergeTile place = locate(tile);
      load_lse(place);
      weigh(place);
      for (uint32_t column = 0; column < tiling.dim; column += tiling.dim_tile) {
        const uint32_t left = tiling.dim - column;
        const uint32_t columns = left < tiling.dim_tile ? left : tiling.dim_tile;
        load_rows(place, column, columns);
        merge(place);
        store_rows(place, column, columns);
      }
    }
  }

 private:
  __aicore__ inline LseMergeTile locate(uint64_t tile) const {
    LseMergeTile place;
    const uint64_t group = tile / tiling.tiles_per_group;
    const uint64_t start = tile % tiling.tiles_per_group * tiling.tile_rows;
    const uint64_t left = tiling.rows_per_group - start;
    place.rows = left < tiling.tile_rows ? static_cast<uint32_t>(left) : tiling.tile_rows;
    place.lse = group * tiling.rows_per_group + start;
    place.row = (group / tiling.inner * tiling.rows_per_group + start) * tiling.inner + group % tiling.inner;
    return place;
  }

  __aicore__ inline void load_lse(const LseMergeTile& place) {
    LocalTensor<float> a = queue_lse_a.template AllocTensor<float>();
    LocalTensor<float> b = queue_lse_b.template AllocTensor<float>();
    const DataCopyExtParams shape{1, static_cast<uint32_t>(place.rows * sizeof(float)), 0, 0, 0};
    const DataCopyPadExtParams<float> padding{false, 0, 0, 0};
    DataCopyPad(a, lse_in_gm[0][place.lse], shape, padding);
    DataCopyPad(b, lse_in_gm[1][place.lse], shape, padding);
    queue_lse_a.EnQue(a);
    queue_lse_b.EnQue(b);
  }

  // weight = exp(lse_x - high) / sum. Where both are -inf, `high` is the lowest finite number: both exponentials are 0 and so are
  // the weights, and log(0) gives the lse of nothing, -inf; without it, -inf - -inf would be NaN.
  __aicore__ inline void weigh(const LseMergeTile& place) {
    LocalTensor<float> a = queue_lse_a.template DeQue<float>();
    LocalTensor<float> b = queue_lse_b.template DeQue<float>();
    LocalTensor<float> merged = queue_lse.template AllocTensor<float>();
    LocalTensor<float> high = high_buffer.template Get<float>();
    LocalTensor<float> sum = sum_buffer.template Get<float>();
    LocalTensor<float> weight_a = weight_a_buffer.template Get<float>();
    LocalTensor<float> weight_b = weight_b_buffer.template Get<float>();
    const int32_t rows = static_cast<int32_t>(place.rows);
    Max(high, a, b, rows);
    Maxs(high, high, kLowest, rows);
    Sub(weight_a, a, high, rows);
    Sub(weight_b, b, high, rows);
    Exp(weight_a, weight_a, rows);
    Exp(weight_b, weight_b, rows);
    Add(sum, weight_a, weight_b, rows);
    Ln(merged, sum, rows);
    Add(merged, merged, high, rows);
    Maxs(sum, sum, kTiny, rows);
    Div(weight_a, weight_a, sum, rows);
    Div(weight_b, weight_b, sum, rows);
    queue_lse_a.FreeTensor(a);
    queue_lse_b.FreeTensor(b);
    queue_lse.EnQue(merged);
    LocalTensor<float> ready = queue_lse.template DeQue<float>();
    DataCopyPad(lse_gm[place.lse], ready, DataCopyExtParams{1, static_cast<uint32_t>(place.rows * sizeof(float)), 0, 0, 0});
    queue_lse.FreeTensor(ready);
    // The scalar unit reads the weights next, and must not overtake the vector unit.
    const event_t event = static_cast<event_t>(pipe.FetchEventID(HardEvent::V_S));
    SetFlag<HardEvent::V_S>(event);
    WaitFlag<HardEvent::V_S>(event);
  }

  __aicore__ inline void load_rows(const LseMergeTile& place, uint32_t column, uint32_t columns) {
    LocalTensor<T> a = rows_a.template AllocTensor<T>();
    LocalTensor<T> b = rows_b.template AllocTensor<T>();
    const uint64_t start = place.row * tiling.dim + column;
    // On the side of the buffer, distances count blocks of 32 bytes beyond the padded end of a row.
    const uint32_t gap = gap_blocks(columns);
    const DataCopyExtParams shape{static_cast<uint16_t>(place.rows), static_cast<uint32_t>(columns * sizeof(T)),
                                      static_cast<uint32_t>((tiling.inner * tiling.dim - columns) * sizeof(T)), gap, 0};
    const DataCopyPadExtParams<T> padding{false, 0, 0, T(0)};
    DataCopyPad(a, in_gm[0][start], shape, padding);
    DataCopyPad(b, in_gm[1][start], shape, padding);
    rows_a.EnQue(a);
    rows_b.EnQue(b);
  }

  __aicore__ inline void merge(const LseMergeTile& place) {
    LocalTensor<T> a = rows_a.template DeQue<T>();
    LocalTensor<T> b = rows_b.template DeQue<T>();
    LocalTensor<T> result = rows_out.template AllocTensor<T>();
    LocalTensor<float> weight_a = weight_a_buffer.template Get<float>();
    LocalTensor<float> weight_b = weight_b_buffer.template Get<float>();
    const int32_t all = static_cast<int32_t>(place.rows * tiling.row_elements);
    if constexpr (sizeof(T) == sizeof(float)) {
      scale(a, weight_a, place.rows);
      scale(b, weight_b, place.rows);
      Add(result, a, b, all);
    } else {
      LocalTensor<float> wide_a = wide_a_buffer.template Get<float>();
      LocalTensor<float> wide_b = wide_b_buffer.template Get<float>();
      Cast(wide_a, a, RoundMode::CAST_NONE, all);
      Cast(wide_b, b, RoundMode::CAST_NONE, all);
      scale(wide_a, weight_a, place.rows);
      scale(wide_b, weight_b, place.rows);
      Add(wide_a, wide_a, wide_b, all);
      Cast(result, wide_a, RoundMode::CAST_RINT, all);
    }
    rows_a.FreeTensor(a);
    rows_b.FreeTensor(b);
    rows_out.EnQue(result);
  }

  // Each row by its weight. A partial of weight 0 doesn't contribute whatever it holds: attention that saw no key may hold NaN.
  __aicore__ inline void scale(LocalTensor<float>& rows, LocalTensor<float>& weights, uint32_t count) {
    const int32_t elements = static_cast<int32_t>(tiling.row_elements);
    for (uint32_t row = 0; row < count; ++row) {
      LocalTensor<float> one = rows[row * tiling.row_elements];
      const float weight = weights.GetValue(row);
      if (weight == 0.0f) {
        Duplicate(one, 0.0f, elements);
      } else {
        Muls(one, one, weight, elements);
      }
    }
  }

  __aicore__ inline void store_rows(const LseMergeTile& place, uint32_t column, uint32_t columns) {
    LocalTensor<T> result = rows_out.template DeQue<T>();
    const DataCopyExtParams shape{static_cast<uint16_t>(place.rows), static_cast<uint32_t>(columns * sizeof(T)), gap_blocks(columns),
                                      static_cast<uint32_t>((tiling.inner * tiling.dim - columns) * sizeof(T)), 0};
    DataCopyPad(out_gm[place.row * tiling.dim + column], result, shape);
    rows_out.FreeTensor(result);
  }

  // The last columns of a long row fill fewer blocks than the row has room for.
  __aicore__ inline uint32_t gap_blocks(uint32_t columns) const {
    const uint64_t used = round_up(columns * sizeof(T), kBlockBytes);
    return static_cast<uint32_t>((tiling.row_elements * sizeof(T) - used) / kBlockBytes);
  }

  TPipe pipe;
  TQue<QuePosition::VECIN, kDouble> rows_a, rows_b, queue_lse_a, queue_lse_b;
  TQue<QuePosition::VECOUT, kDouble> rows_out, queue_lse;
  TBuf<QuePosition::VECCALC> high_buffer, sum_buffer, weight_a_buffer, weight_b_buffer, wide_a_buffer, wide_b_buffer;
  GlobalTensor<T> in_gm[2], out_gm;
  GlobalTensor<float> lse_in_gm[2], lse_gm;
  LseMergeTiling tiling;
};

template <typename T>
__aicore__ inline void run_lse_merge(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b, GM_ADDR out, GM_ADDR lse,
                                     const LseMergeTiling& tiling) {
  LseMerge<T> kernel;
  kernel.init(out_a, lse_a, out_b, lse_b, out, lse, tiling);
  kernel.process();
}

}  // namespace hp_cann

extern "C" __global__ __aicore__ void hp_lse_merge_float32(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b, GM_ADDR out,
                                                           GM_ADDR lse, hp_cann::LseMergeTiling tiling) {
  hp_cann::run_lse_merge<float>(out_a, lse_a, out_b, lse_b, out, lse, tiling);
}

extern "C" __global__ __aicore__ void hp_lse_merge_float16(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b, GM_ADDR out,
                                                           GM_ADDR lse, hp_cann::LseMergeTiling tiling) {
  hp_cann::run_lse_merge<half>(out_a, lse_a, out_b, lse_b, out, lse, tiling);
}

extern "C" __global__ __aicore__ void hp_lse_merge_bfloat16(GM_ADDR out_a, GM_ADDR lse_a, GM_ADDR out_b, GM_ADDR lse_b, GM_ADDR out,
                                                            GM_ADDR lse, hp_cann::LseMergeTiling tiling) {
  hp_cann::run_lse_merge<bfloat16_t>(out_a, lse_a, out_b, lse_b, out, lse, tiling);
}
