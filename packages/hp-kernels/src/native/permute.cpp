// Tokens to the rows of their experts and back: counts and rows, dispatch, combine, and the gradient of combine (see permute.py).
// rows [tokens, top_k] holds a permutation of 0 ... tokens * top_k - 1: where slot (token, k) lies among the rows of the experts.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "half_rows.h"
#include "scratch.h"
#include "streaming.h"
#include "threads.h"

namespace hp::moe {
namespace {

constexpr std::int64_t kGrainBytes = 1 << 16;
constexpr std::int64_t kColumns = 2048;  // of a row that are summed at a time: their float32 sums stay in the fastest cache

std::int64_t grain_of(std::int64_t bytes_per_token) { return kGrainBytes / std::max<std::int64_t>(1, bytes_per_token) + 1; }

template <typename I>
void sort_slots(const Array& experts, std::int64_t* rows, std::int64_t* counts, std::int64_t* offsets, std::int64_t num_experts) {
  const I* expert = experts.data<I>();
  std::fill(counts, counts + num_experts, 0);
  for (std::int64_t slot = 0; slot < experts.numel; ++slot) {
    const std::int64_t number = expert[slot];
    if (number < 0 || number >= num_experts) {
      throw ArgumentError("experts: slot " + std::to_string(slot) + " names expert " + std::to_string(number) +
                          ", there are 0 to " + std::to_string(num_experts - 1));
    }
    ++counts[number];
  }
  offsets[0] = 0;
  for (std::int64_t number = 0; number < num_experts; ++number) offsets[number + 1] = offsets[number] + counts[number];
  std::vector<std::int64_t> next(offsets, offsets + num_experts);
  // In the order of slots, so that the rows of an expert keep the order of the tokens.
  for (std::int64_t slot = 0; slot < experts.numel; ++slot) rows[slot] = next[expert[slot]]++;
}

// Every row once: the kernels write to these places, from several threads.
void require_permutation(const std::int64_t* rows, std::int64_t count) {
  std::vector<std::uint64_t> seen(static_cast<std::size_t>(count / 64 + 1));
  for (std::int64_t slot = 0; slot < count; ++slot) {
    const std::int64_t row = rows[slot];
    if (row < 0 || row >= count) {
      throw ArgumentError("rows: slot " + std::to_string(slot) + " names row " + std::to_string(row) + ", there are 0 to " +
                          std::to_string(count - 1));
    }
    const std::uint64_t bit = std::uint64_t{1} << (row % 64);
    std::uint64_t& word = seen[static_cast<std::size_t>(row / 64)];
    if (word & bit) throw ArgumentError("rows: row " + std::to_string(row) + " appears twice; it must hold every row once");
    word |= bit;
  }
}

struct Slots {
  std::int64_t tokens, top_k, dim;
};

// `token_rows` [tokens, dim], `permuted` [tokens * top_k, dim].
Slots slots_of(const Array& token_rows, const Array& permuted, const Array& rows) {
  require_ndim(token_rows, 2);
  require_ndim(rows, 2);
  require_dtype(rows, {DType::int64});
  const Slots slots{token_rows.dim(0), rows.dim(1), token_rows.dim(1)};
  require_shape(rows, {slots.tokens, slots.top_k});
  require_shape(permuted, {rows.numel, slots.dim});
  require_dtype(permuted, {token_rows.dtype});
  return slots;
}

template <typename Visit>
void with_type(const Array& array, Visit&& visit) {
  require_dtype(array, {DType::float32, DType::float64, DType::float16, DType::bfloat16});
  if (array.dtype == DType::float32) return visit(float{});
  if (array.dtype == DType::float64) return visit(double{});
  if (array.dtype == DType::float16) return visit(Half{});
  return visit(BFloat16{});
}

// Weights, in whatever type they are, as what sums are made in.
template <typename C>
C weight_at(const Array& weights, std::int64_t slot) {
  if (weights.dtype == DType::float32) return static_cast<C>(weights.data<float>()[slot]);
  if (weights.dtype == DType::float64) return static_cast<C>(weights.data<double>()[slot]);
  if (weights.dtype == DType::float16) return static_cast<C>(widen(weights.data<Half>()[slot]));
  return static_cast<C>(widen(weights.data<BFloat16>()[slot]));
}

template <typename C>
void set_weight(const Array& weights, std::int64_t slot, C value) {
  if (weights.dtype == DType::float32) {
    weights.data<float>()[slot] = static_cast<float>(value);
  } else if (weights.dtype == DType::float64) {
    weights.data<double>()[slot] = static_cast<double>(value);
  } else if (weights.dtype == DType::float16) {
    narrow(static_cast<float>(value), weights.data<Half>()[slot]);
  } else {
    narrow(static_cast<float>(value), weights.data<BFloat16>()[slot]);
  }
}

// float32 weights go with everything but float64 rows, which need weights of their own width; else they have the dtype of the rows.
void require_weights(const Array& weights, const Array& rows, const Array& permuted) {
  require_shape(weights, rows.shape);
  if (permuted.dtype == DType::float64) {
    require_dtype(weights, {DType::float64});
  } else {
    require_dtype(weights, {DType::float32, permuted.dtype});
  }
}

// Adds N terms, in order, to what `before` holds (where kMore), into `sum`, or rounded into `out` (where kLast). Sums of bfloat16
// are kept in an order of their own: all first elements of pairs, then all second ones.
template <int N, bool kMore, bool kLast, typename T, typename C>
HP_INLINE void terms_body(const T* const* rows, const C* weights, const C* before, C* sum, T* out, std::int64_t count) {
  const T* row[N];
  C weight[N];
  for (int n = 0; n < N; ++n) row[n] = rows[n], weight[n] = weights[n];
  std::int64_t start = 0;
  if constexpr (std::is_same_v<T, BFloat16>) {
    const std::int64_t pairs = count / 2;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < pairs; ++i) {
      std::uint32_t pair = pair_at(row[0] + 2 * i);
      C first = first_of(pair) * weight[0], second = second_of(pair) * weight[0];
      if constexpr (kMore) first = before[i] + first, second = before[i + pairs] + second;
      for (int n = 1; n < N; ++n) {
        pair = pair_at(row[n] + 2 * i);
        first += first_of(pair) * weight[n];
        second += second_of(pair) * weight[n];
      }
      if constexpr (kLast) {
        set_pair(out + 2 * i, first, second);
      } else {
        sum[i] = first, sum[i + pairs] = second;
      }
    }
    start = 2 * pairs;
  }
#pragma GCC ivdep
  for (std::int64_t i = start; i < count; ++i) {
    C value = widen(row[0][i]) * weight[0];
    if constexpr (kMore) value = before[i] + value;
    for (int n = 1; n < N; ++n) value += widen(row[n][i]) * weight[n];
    if constexpr (kLast) {
      narrow(value, out[i]);
    } else {
      sum[i] = value;
    }
  }
}

// The same for null where there is nothing before, or where it isn't the last.
template <int N, typename T, typename C>
HP_INLINE void any_terms_body(const T* const* rows, const C* weights, const C* before, C* sum, T* out, std::int64_t count) {
  if (before == nullptr && out != nullptr) {
    terms_body<N, false, true>(rows, weights, before, sum, out, count);
  } else if (before == nullptr) {
    terms_body<N, false, false>(rows, weights, before, sum, out, count);
  } else if (out != nullptr) {
    terms_body<N, true, true>(rows, weights, before, sum, out, count);
  } else {
    terms_body<N, true, false>(rows, weights, before, sum, out, count);
  }
}

// Writes weight * grad, and leaves the first halving of the products grad * row in `products`.
template <typename G, typename T, typename C>
HP_INLINE void backward_body(const G* grad, const T* row, T* grad_row, C* products, std::int64_t dim, C weight) {
  const std::int64_t half = (dim + 1) / 2, pairs = dim - half;
  std::int64_t start = 0;
  if constexpr (std::is_same_v<G, BFloat16> && std::is_same_v<T, BFloat16>) {
    start = pairs / 2 * 2;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < start; i += 2) {
      const std::uint32_t low = pair_at(grad + i), high = pair_at(grad + i + half);
      const std::uint32_t row_low = pair_at(row + i), row_high = pair_at(row + i + half);
      set_pair(grad_row + i, first_of(low) * weight, second_of(low) * weight);
      set_pair(grad_row + i + half, first_of(high) * weight, second_of(high) * weight);
      products[i] = first_of(low) * first_of(row_low) + first_of(high) * first_of(row_high);
      products[i + 1] = second_of(low) * second_of(row_low) + second_of(high) * second_of(row_high);
    }
  }
#pragma GCC ivdep
  for (std::int64_t i = start; i < pairs; ++i) {
    const C low = widen(grad[i]), high = widen(grad[i + half]);
    narrow(low * weight, grad_row[i]);
    narrow(high * weight, grad_row[i + half]);
    products[i] = low * widen(row[i]) + high * widen(row[i + half]);
  }
  if (pairs < half) {
    const C middle = widen(grad[pairs]);
    narrow(middle * weight, grad_row[pairs]);
    products[pairs] = middle * widen(row[pairs]);
  }
}

// The sum of `count` numbers, the upper half added to the lower until one is left: an order that array operations can follow too.
template <typename C>
HP_INLINE C halve_body(C* numbers, std::int64_t count) {
  // Two halvings in one pass, as long as the first leaves an even number.
  for (; count > 0 && count % 4 == 0; count /= 4) {
    const std::int64_t quarter = count / 4;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < quarter; ++i) {
      numbers[i] = (numbers[i] + numbers[i + 2 * quarter]) + (numbers[i + quarter] + numbers[i + 3 * quarter]);
    }
  }
  while (count > 1) {
    const std::int64_t half = (count + 1) / 2, pairs = count - half;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < pairs; ++i) numbers[i] += numbers[i + half];
    count = half;
  }
  return count == 1 ? numbers[0] : C{0};
}

// The loops for each type, by overloads.
#define HP_TERMS(NAME, N, T, C)                                                                                          \
  HP_VARIANTS(void, NAME,                                                                                                \
              (const T* const* rows, const C* weights, const C* before, C* sum, T* out, std::int64_t count),             \
              (rows, weights, before, sum, out, count), any_terms_body<N>(rows, weights, before, sum, out, count))
#define HP_LOOPS(G, T, C)                                                                                                \
  HP_TERMS(one_term, 1, T, C)                                                                                            \
  HP_TERMS(two_terms, 2, T, C)                                                                                           \
  HP_TERMS(four_terms, 4, T, C)                                                                                          \
  HP_VARIANTS(void, row_backward,                                                                                        \
              (const G* grad, const T* row, T* grad_row, C* products, std::int64_t dim, C weight),                       \
              (grad, row, grad_row, products, dim, weight), backward_body(grad, row, grad_row, products, dim, weight))
#define HP_HALVE(C) \
  HP_VARIANTS(C, halve, (C * numbers, std::int64_t count), (numbers, count), halve_body(numbers, count))
HP_LOOPS(float, float, float)
HP_LOOPS(double, double, double)
HP_LOOPS(BFloat16, BFloat16, float)
HP_HALVE(float)
HP_HALVE(double)
#undef HP_HALVE
#undef HP_LOOPS
#undef HP_TERMS

template <typename T>
void combine(const T* permuted, const std::int64_t* rows, const Array* weights, T* out, const Slots& slots, std::int64_t begin,
             std::int64_t end) {
  using C = WideOf<T>;
  constexpr bool halves = std::is_same_v<T, Half>;
  Scratch<C> sum(kColumns);
  std::vector<C> weight(static_cast<std::size_t>(slots.top_k), C{1});
  Scratch<float> scratch(halves ? 5 * kColumns : 0);
  const std::size_t row_bytes = static_cast<std::size_t>(slots.dim) * sizeof(T);
  for (std::int64_t token = begin; token < end; ++token) {
    const std::int64_t* row = rows + token * slots.top_k;
    for (std::int64_t k = 0; k < (token + 1 < end ? slots.top_k : 0); ++k) {
      fetch_row(permuted + row[slots.top_k + k] * slots.dim, row_bytes);
    }
    if (weights != nullptr) {
      for (std::int64_t k = 0; k < slots.top_k; ++k) weight[k] = weight_at<C>(*weights, token * slots.top_k + k);
    }
    for (std::int64_t column = 0; column < slots.dim; column += kColumns) {
      const std::int64_t count = std::min(kColumns, slots.dim - column);
      T* const target = out + token * slots.dim + column;
      if (slots.top_k == 0) std::fill(target, target + count, T{});
      for (std::int64_t k = 0, terms; k < slots.top_k; k += terms) {
        const std::int64_t left = slots.top_k - k;
        terms = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        decltype(opened(permuted, nullptr, 0)) sources[4];
        for (std::int64_t n = 0; n < terms; ++n) {
          sources[n] = opened(permuted + row[k + n] * slots.dim + column, scratch.data() + (halves ? n * kColumns : 0), count);
        }
        const C* before = k == 0 ? nullptr : sum.data();
        auto* last = left == terms ? target_of(target, scratch.data() + (halves ? 4 * kColumns : 0)) : nullptr;
        if (terms == 4) {
          four_terms(sources, weight.data() + k, before, sum.data(), last, count);
        } else if (terms == 2) {
          two_terms(sources, weight.data() + k, before, sum.data(), last, count);
        } else {
          one_term(sources, weight.data() + k, before, sum.data(), last, count);
        }
      }
      if (slots.top_k > 0) close(target, scratch.data() + (halves ? 4 * kColumns : 0), count);
    }
  }
}

template <typename T>
void combine_backward(const T* grad_out, const T* permuted, const std::int64_t* rows, const Array& weights, T* grad_permuted,
                      const Array& grad_weights, const Slots& slots, std::int64_t begin, std::int64_t end) {
  using C = WideOf<T>;
  const std::size_t dim = static_cast<std::size_t>(slots.dim);
  const std::size_t stride = std::is_same_v<T, Half> ? line_stride<float>(dim) : 0;
  Scratch<C> products(dim / 2 + 1);
  Scratch<float> scratch(3 * stride);
  float *source = scratch.data(), *target = source + stride, *wide = target + stride;
  // Large results are made row by row in a buffer that stays in the fastest cache, and streamed from there.
  const bool streams = slots.tokens * slots.top_k * slots.dim * static_cast<std::int64_t>(sizeof(T)) >= kStreamBytes;
  Scratch<T> buffer(streams ? dim : 0);
  for (std::int64_t token = begin; token < end; ++token) {
    const auto* grad = opened(grad_out + token * slots.dim, wide, slots.dim);
    for (std::int64_t k = 0; k < slots.top_k; ++k) {
      const std::int64_t slot = token * slots.top_k + k, start = rows[slot] * slots.dim;
      if (slot + 1 < end * slots.top_k) fetch_row(permuted + rows[slot + 1] * slots.dim, dim * sizeof(T));
      T* const result = streams ? buffer.data() : grad_permuted + start;
      row_backward(grad, opened(permuted + start, source, slots.dim), target_of(result, target), products.data(), slots.dim,
                   weight_at<C>(weights, slot));
      close(result, target, slots.dim);
      if (streams) stream_row(grad_permuted + start, result, dim * sizeof(T));
      set_weight(grad_weights, slot, halve(products.data(), (slots.dim + 1) / 2));
    }
  }
  if (streams) stream_end();
}

void moe_sort(const py::tuple& experts_, const py::tuple& rows_, const py::tuple& counts_, const py::tuple& offsets_) {
  const Array experts = array_of(experts_, "experts"), rows = array_of(rows_, "rows");
  const Array counts = array_of(counts_, "counts"), offsets = array_of(offsets_, "offsets");
  require_dtype(experts, {DType::int64, DType::int32});
  for (const Array* array : {&rows, &counts, &offsets}) require_dtype(*array, {DType::int64});
  require_shape(rows, experts.shape);
  require_ndim(counts, 1);
  require_shape(offsets, {checked_sum(counts.dim(0), 1, "offsets")});
  for (const Array* array : {&rows, &counts, &offsets}) require_disjoint(*array, experts);
  require_disjoint(rows, counts);
  require_disjoint(rows, offsets);
  require_disjoint(counts, offsets);
  py::gil_scoped_release release;
  if (experts.dtype == DType::int64) {
    sort_slots<std::int64_t>(experts, rows.data<std::int64_t>(), counts.data<std::int64_t>(), offsets.data<std::int64_t>(),
                             counts.numel);
  } else {
    sort_slots<std::int32_t>(experts, rows.data<std::int64_t>(), counts.data<std::int64_t>(), offsets.data<std::int64_t>(),
                             counts.numel);
  }
}

void moe_dispatch(const py::tuple& tokens_, const py::tuple& rows_, const py::tuple& permuted_) {
  const Array tokens = array_of(tokens_, "tokens"), rows = array_of(rows_, "rows"), permuted = array_of(permuted_, "permuted");
  const Slots slots = slots_of(tokens, permuted, rows);
  require_disjoint(permuted, tokens);
  require_disjoint(permuted, rows);
  const std::int64_t* row = rows.data<std::int64_t>();
  py::gil_scoped_release release;
  require_permutation(row, rows.numel);
  // Of nothing, one size may be larger than any memory: no product with it may be made, and no loop over it.
  if (permuted.numel == 0) return;
  const std::size_t bytes = static_cast<std::size_t>(slots.dim * size_of(tokens.dtype));
  const bool streams = permuted.bytes >= kStreamBytes;
  parallel_for(slots.tokens, grain_of(slots.top_k * static_cast<std::int64_t>(bytes)), [&](std::int64_t begin, std::int64_t end) {
    const char* source = tokens.data<const char>() + static_cast<std::size_t>(begin) * bytes;
    for (std::int64_t slot = begin * slots.top_k; begin < end; ++begin, source += bytes) {
      for (std::int64_t k = 0; k < slots.top_k; ++k, ++slot) {
        char* const target = permuted.data<char>() + static_cast<std::size_t>(row[slot]) * bytes;
        if (streams) {
          stream_row(target, source, bytes);
        } else {
          std::memcpy(target, source, bytes);
        }
      }
    }
    if (streams) stream_end();
  });
}

void moe_combine(const py::tuple& permuted_, const py::tuple& rows_, const py::object& weights_, const py::tuple& out_) {
  const Array permuted = array_of(permuted_, "permuted"), rows = array_of(rows_, "rows"), out = array_of(out_, "out");
  const bool weighted = !weights_.is_none();
  const Array weights = weighted ? array_of(weights_, "weights") : rows;
  const Slots slots = slots_of(out, permuted, rows);
  if (weighted) require_weights(weights, rows, permuted);
  for (const Array* array : {&permuted, &rows, &weights}) require_disjoint(out, *array);
  with_type(out, [&](auto element) {
    using T = decltype(element);
    py::gil_scoped_release release;
    require_permutation(rows.data<std::int64_t>(), rows.numel);
    if (out.numel == 0) return;
    parallel_for(slots.tokens, grain_of((slots.top_k + 1) * slots.dim * size_of(out.dtype)),
                 [&](std::int64_t begin, std::int64_t end) {
                   combine<T>(permuted.data<T>(), rows.data<std::int64_t>(), weighted ? &weights : nullptr, out.data<T>(), slots,
                              begin, end);
                 });
  });
}

void moe_combine_backward(const py::tuple& grad_out_, const py::tuple& permuted_, const py::tuple& rows_, const py::tuple& weights_,
                          const py::tuple& grad_permuted_, const py::tuple& grad_weights_) {
  const Array grad_out = array_of(grad_out_, "grad_out"), permuted = array_of(permuted_, "permuted");
  const Array rows = array_of(rows_, "rows"), weights = array_of(weights_, "weights");
  const Array grad_permuted = array_of(grad_permuted_, "grad_permuted"), grad_weights = array_of(grad_weights_, "grad_weights");
  const Slots slots = slots_of(grad_out, permuted, rows);
  require_weights(weights, rows, permuted);
  require_shape(grad_permuted, permuted.shape);
  require_dtype(grad_permuted, {permuted.dtype});
  require_shape(grad_weights, weights.shape);
  require_dtype(grad_weights, {weights.dtype});
  for (const Array* written : {&grad_permuted, &grad_weights}) {
    for (const Array* read : {&grad_out, &permuted, &rows, &weights}) require_disjoint(*written, *read);
  }
  require_disjoint(grad_permuted, grad_weights);
  with_type(grad_out, [&](auto element) {
    using T = decltype(element);
    py::gil_scoped_release release;
    require_permutation(rows.data<std::int64_t>(), rows.numel);
    if (rows.numel == 0) return;
    parallel_for(slots.tokens, grain_of(2 * slots.top_k * slots.dim * size_of(permuted.dtype)),
                 [&](std::int64_t begin, std::int64_t end) {
                   combine_backward<T>(grad_out.data<T>(), permuted.data<T>(), rows.data<std::int64_t>(), weights,
                                       grad_permuted.data<T>(), grad_weights, slots, begin, end);
                 });
  });
}

}  // namespace
}  // namespace hp::moe

void register_permute(pybind11::module_& module) {
  namespace py = pybind11;
  module.def("moe_sort", &hp::moe::moe_sort, py::arg("experts"), py::arg("rows"), py::arg("counts"), py::arg("offsets"),
             "Write the row of every slot, and how many rows each expert has and where they begin.");
  module.def("moe_dispatch", &hp::moe::moe_dispatch, py::arg("tokens"), py::arg("rows"), py::arg("permuted"),
             "Write every token into the rows of its slots.");
  module.def("moe_combine", &hp::moe::moe_combine, py::arg("permuted"), py::arg("rows"), py::arg("weights"), py::arg("out"),
             "Write the weighted sum of every token's rows.");
  module.def("moe_combine_backward", &hp::moe::moe_combine_backward, py::arg("grad_out"), py::arg("permuted"), py::arg("rows"),
             py::arg("weights"), py::arg("grad_permuted"), py::arg("grad_weights"),
             "Write the gradients of the rows and of the weights.");
}
