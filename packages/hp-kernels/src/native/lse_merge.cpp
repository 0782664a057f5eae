// Merge of two attention partials, computed over different keys for the same queries, and its gradient (see lse_merge.py).
// A partial is out [n0, n1, n2, dim] and lse, whose last two dims are in the same order or swapped.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "half_rows.h"
#include "scratch.h"
#include "threads.h"

namespace hp::attention {
namespace {

constexpr std::int64_t kBlock = 64;  // rows whose weights are computed together
constexpr std::int64_t kGrainBytes = 1 << 16;

// Where the lse of a row is: rows are counted as out has them.
struct Rows {
  std::int64_t middle, inner, dim;
  bool swapped;

  HP_INLINE std::int64_t lse_index(std::int64_t row) const {
    if (!swapped) return row;
    const std::int64_t outer = row / (middle * inner), rest = row % (middle * inner);
    return (outer * inner + rest % inner) * middle + rest / inner;
  }
};

// exp(-distance) for distance >= 0, to about one unit in the last place; loops over it become vector code, which the library's
// exp does not. distance = n ln 2 + rest, and the series of exp(rest) has converged after eight terms as |rest| <= ln(2) / 2.
HP_INLINE float exp_of_minus(float distance) {
  const float x = -(distance < 110.0f ? distance : 110.0f);  // beyond it the result is 0, and so it is for NaN
  const float shifted = x * 1.44269504089f + 12582912.0f;     // adding 1.5 * 2^23 rounds to an integer, in the lowest bits
  const float whole = shifted - 12582912.0f;
  const float rest = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;  // ln 2 in two parts, the first exact in products
  float sum = 1.0f / 5040;
  sum = sum * rest + 1.0f / 720;
  sum = sum * rest + 1.0f / 120;
  sum = sum * rest + 1.0f / 24;
  sum = sum * rest + 1.0f / 6;
  sum = sum * rest + 0.5f;
  sum = (sum * rest) * rest + rest + 1.0f;
  // In two factors, so that both are normal numbers where the result is a subnormal one.
  const std::int32_t exponent = static_cast<std::int32_t>(bits_of(shifted)) - 0x4b400000;
  const std::int32_t half = exponent >> 1;
  return sum * float_of_bits(static_cast<std::uint32_t>(half + 127) << 23) *
         float_of_bits(static_cast<std::uint32_t>(exponent - half + 127) << 23);
}

// log(1 + ratio) for ratio in [0, 1], as 2 artanh(ratio / (2 + ratio)): the argument is at most 1/3, and nothing cancels.
HP_INLINE float log_of_one_plus(float ratio) {
  const float x = ratio / (2.0f + ratio), square = x * x;
  float sum = 1.0f / 15;
  sum = sum * square + 1.0f / 13;
  sum = sum * square + 1.0f / 11;
  sum = sum * square + 1.0f / 9;
  sum = sum * square + 1.0f / 7;
  sum = sum * square + 1.0f / 5;
  sum = sum * square + 1.0f / 3;
  return 2.0f * (x + x * (sum * square));
}

HP_INLINE double exp_of_minus(double distance) { return std::exp(-distance); }
HP_INLINE double log_of_one_plus(double ratio) { return std::log1p(ratio); }

// weight_x = exp(lse_x - lse). -inf is the lse of attention that saw no key; of two such, both weights are 0.
template <typename C>
HP_INLINE void weigh_body(const C* lse_a, const C* lse_b, C* weight_a, C* weight_b, C* lse, std::int64_t count) {
  constexpr C nothing = -std::numeric_limits<C>::infinity();
  for (std::int64_t i = 0; i < count; ++i) {
    const C a = lse_a[i], b = lse_b[i];
    const bool first = a > b;
    const C high = first ? a : b, distance = high - (first ? b : a);
    const C value = exp_of_minus(distance);
    const C ratio = distance == distance ? value : distance;  // NaN stays
    const C share = 1 / (1 + ratio), rest = ratio * share, sum = high + log_of_one_plus(ratio);
    const bool neither = a == nothing && b == nothing;
    weight_a[i] = neither ? 0 : first ? share : rest;
    weight_b[i] = neither ? 0 : first ? rest : share;
    lse[i] = neither ? nothing : sum;
  }
}

template <typename... T>
constexpr bool kAllBFloat = (std::is_same_v<T, BFloat16> && ...);

template <typename A, typename O, typename C>
HP_INLINE void scale_body(const A* a, O* out, std::int64_t dim, C weight) {
  std::int64_t start = 0;
  if constexpr (kAllBFloat<A, O>) {
    start = dim / 2 * 2;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < start; i += 2) {
      const std::uint32_t pair = pair_at(a + i);
      set_pair(out + i, first_of(pair) * weight, second_of(pair) * weight);
    }
  }
#pragma GCC ivdep
  for (std::int64_t i = start; i < dim; ++i) narrow(widen(a[i]) * weight, out[i]);
}

// `out` may be `a` itself.
template <typename A, typename B, typename O, typename C>
HP_INLINE void merge_body(const A* a, const B* b, O* out, std::int64_t dim, C weight_a, C weight_b) {
  std::int64_t start = 0;
  if constexpr (kAllBFloat<A, B, O>) {
    start = dim / 2 * 2;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < start; i += 2) {
      const std::uint32_t pair_a = pair_at(a + i), pair_b = pair_at(b + i);
      set_pair(out + i, first_of(pair_a) * weight_a + first_of(pair_b) * weight_b,
               second_of(pair_a) * weight_a + second_of(pair_b) * weight_b);
    }
  }
#pragma GCC ivdep
  for (std::int64_t i = start; i < dim; ++i) narrow(widen(a[i]) * weight_a + widen(b[i]) * weight_b, out[i]);
}

// grad_x = weight_x * grad for both; returns the product of grad with a - b.
template <typename A, typename B, typename O, typename C>
HP_INLINE C backward_body(const O* grad, const A* a, const B* b, A* grad_a, B* grad_b, std::int64_t dim, C weight_a, C weight_b) {
  constexpr std::int64_t kLanes = 16;
  C lanes[kLanes] = {};
  const std::int64_t whole = dim / kLanes * kLanes;
  if constexpr (kAllBFloat<A, B, O>) {
    C first[kLanes / 2] = {}, second[kLanes / 2] = {};
    for (std::int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC ivdep
      for (std::int64_t j = 0; j < kLanes / 2; ++j) {
        const std::int64_t at = i + 2 * j;
        const std::uint32_t pair = pair_at(grad + at), pair_a = pair_at(a + at), pair_b = pair_at(b + at);
        set_pair(grad_a + at, first_of(pair) * weight_a, second_of(pair) * weight_a);
        set_pair(grad_b + at, first_of(pair) * weight_b, second_of(pair) * weight_b);
        first[j] += first_of(pair) * (first_of(pair_a) - first_of(pair_b));
        second[j] += second_of(pair) * (second_of(pair_a) - second_of(pair_b));
      }
    }
    for (std::int64_t j = 0; j < kLanes / 2; ++j) lanes[2 * j] = first[j], lanes[2 * j + 1] = second[j];
  } else {
    for (std::int64_t i = 0; i < whole; i += kLanes) {
#pragma GCC ivdep
      for (std::int64_t j = 0; j < kLanes; ++j) {
        const C value = widen(grad[i + j]);
        narrow(value * weight_a, grad_a[i + j]);
        narrow(value * weight_b, grad_b[i + j]);
        lanes[j] += value * (widen(a[i + j]) - widen(b[i + j]));
      }
    }
  }
  for (std::int64_t i = whole; i < dim; ++i) {
    const C value = widen(grad[i]);
    narrow(value * weight_a, grad_a[i]);
    narrow(value * weight_b, grad_b[i]);
    lanes[i - whole] += value * (widen(a[i]) - widen(b[i]));
  }
  C sum = 0;
  for (std::int64_t j = 0; j < kLanes; ++j) sum += lanes[j];
  return sum;
}

// The loops for each combination of types, by overloads.
#define HP_WEIGH(C)                                                                                                     \
  HP_VARIANTS(void, weigh,                                                                                              \
              (const C* lse_a, const C* lse_b, C* weight_a, C* weight_b, C* lse, std::int64_t count),                   \
              (lse_a, lse_b, weight_a, weight_b, lse, count), weigh_body(lse_a, lse_b, weight_a, weight_b, lse, count))
#define HP_SCALE(A, O, C)                                                                                               \
  HP_VARIANTS(void, scale_row, (const A* a, O* out, std::int64_t dim, C weight), (a, out, dim, weight),                 \
              scale_body(a, out, dim, weight))
#define HP_MERGE(A, B, O, C)                                                                                            \
  HP_VARIANTS(void, merge_row, (const A* a, const B* b, O* out, std::int64_t dim, C weight_a, C weight_b),              \
              (a, b, out, dim, weight_a, weight_b), merge_body(a, b, out, dim, weight_a, weight_b))                     \
  HP_VARIANTS(C, merge_row_backward,                                                                                    \
              (const O* grad, const A* a, const B* b, A* grad_a, B* grad_b, std::int64_t dim, C weight_a, C weight_b),  \
              (grad, a, b, grad_a, grad_b, dim, weight_a, weight_b),                                                    \
              backward_body(grad, a, b, grad_a, grad_b, dim, weight_a, weight_b))
HP_WEIGH(float)
HP_WEIGH(double)
HP_SCALE(float, float, float)
HP_SCALE(double, double, double)
HP_SCALE(BFloat16, BFloat16, float)
HP_SCALE(BFloat16, float, float)
HP_SCALE(float, BFloat16, float)
HP_MERGE(float, float, float, float)
HP_MERGE(double, double, double, double)
HP_MERGE(BFloat16, BFloat16, BFloat16, float)
HP_MERGE(float, BFloat16, float, float)
#undef HP_WEIGH
#undef HP_SCALE
#undef HP_MERGE

template <typename C>
struct Weights {
  std::int64_t index[kBlock];
  alignas(kLineBytes) C first[kBlock], second[kBlock], a[kBlock], b[kBlock], lse[kBlock];

  void compute(const Rows& rows, const C* lse_a, const C* lse_b, std::int64_t begin, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      index[i] = rows.lse_index(begin + i);
      first[i] = lse_a[index[i]];
      second[i] = lse_b[index[i]];
    }
    weigh(first, second, a, b, lse, count);
  }
};

// Scaled, or zeros for weight 0: what has no weight doesn't contribute whatever it holds, and attention that saw no key may hold NaN.
template <typename A, typename O, typename C>
void scale(const A* a, O* out, std::int64_t dim, C weight, float* scratch) {
  if (weight == 0) {
    std::fill(out, out + dim, O{});
    return;
  }
  scale_row(opened(a, scratch, dim), target_of(out, scratch), dim, weight);
  close(out, scratch, dim);
}

template <typename A, typename B, typename O, typename C>
void merge(const A* a, const C* lse_a, const B* b, const C* lse_b, O* out, C* lse, const Rows& rows, std::int64_t begin,
           std::int64_t end) {
  const std::int64_t dim = rows.dim;
  const std::size_t stride = std::is_same_v<A, Half> || std::is_same_v<B, Half> ? line_stride<float>(static_cast<std::size_t>(dim)) : 0;
  Scratch<float> scratch(2 * stride);
  float *scratch_a = scratch.data(), *scratch_b = scratch_a + stride;
  Weights<C> weights;
  for (std::int64_t block = begin; block < end; block += kBlock) {
    const std::int64_t count = std::min(kBlock, end - block);
    weights.compute(rows, lse_a, lse_b, block, count);
    for (std::int64_t i = 0; i < count; ++i) lse[weights.index[i]] = weights.lse[i];
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t start = (block + i) * dim;
      if (weights.a[i] == 0) {
        scale(b + start, out + start, dim, weights.b[i], scratch_b);
      } else if (weights.b[i] == 0) {
        scale(a + start, out + start, dim, weights.a[i], scratch_a);
      } else if constexpr (std::is_same_v<A, Half> && std::is_same_v<B, Half> && std::is_same_v<O, Half>) {
        merge_halves(a + start, b + start, out + start, dim, weights.a[i], weights.b[i]);
      } else {
        merge_row(opened(a + start, scratch_a, dim), opened(b + start, scratch_b, dim), target_of(out + start, scratch_a), dim,
                  weights.a[i], weights.b[i]);
        close(out + start, scratch_a, dim);
      }
    }
  }
}

template <typename A, typename B, typename O, typename C>
void merge_backward(const O* grad, const C* grad_lse, const A* a, const C* lse_a, const B* b, const C* lse_b, A* grad_a,
                    C* grad_lse_a, B* grad_b, C* grad_lse_b, const Rows& rows, std::int64_t begin, std::int64_t end) {
  const std::int64_t dim = rows.dim;
  const std::size_t stride = std::is_same_v<A, Half> || std::is_same_v<B, Half> ? line_stride<float>(static_cast<std::size_t>(dim)) : 0;
  Scratch<float> scratch(5 * stride);
  float *wide = scratch.data(), *wide_a = wide + stride, *wide_b = wide_a + stride;
  float *target_a = wide_b + stride, *target_b = target_a + stride;
  Weights<C> weights;
  for (std::int64_t block = begin; block < end; block += kBlock) {
    const std::int64_t count = std::min(kBlock, end - block);
    weights.compute(rows, lse_a, lse_b, block, count);
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t start = (block + i) * dim, at = weights.index[i];
      const C weight_a = weights.a[i], weight_b = weights.b[i];
      C slope = 0;
      if (weight_a == 0 || weight_b == 0) {
        // One alone makes up the result: it takes the gradient as it is, and the other none.
        scale(grad + start, grad_a + start, dim, weight_a, wide);
        scale(grad + start, grad_b + start, dim, weight_b, wide);
      } else if constexpr (std::is_same_v<A, Half> && std::is_same_v<B, Half> && std::is_same_v<O, Half>) {
        slope = weight_a * weight_b *
                merge_halves_backward(grad + start, a + start, b + start, grad_a + start, grad_b + start, dim, weight_a, weight_b);
      } else {
        slope = weight_a * weight_b *
                merge_row_backward(opened(grad + start, wide, dim), opened(a + start, wide_a, dim), opened(b + start, wide_b, dim),
                                   target_of(grad_a + start, target_a), target_of(grad_b + start, target_b), dim, weight_a, weight_b);
        close(grad_a + start, target_a, dim);
        close(grad_b + start, target_b, dim);
      }
      const C own = grad_lse == nullptr ? 0 : grad_lse[at];
      grad_lse_a[at] = weight_a == 0 ? 0 : slope + weight_a * own;
      grad_lse_b[at] = weight_b == 0 ? 0 : weight_b * own - slope;
    }
  }
}

// Calls visit(A{}, B{}, O{}, C{}) for the element types of two partials and their merge.
template <typename Visit>
void with_types(DType a, DType b, Visit&& visit) {
  if (a == DType::float64 && b == DType::float64) return visit(double{}, double{}, double{}, double{});
  if (a == DType::float32 && b == DType::float32) return visit(float{}, float{}, float{}, float{});
  if (a == DType::float16 && b == DType::float16) return visit(Half{}, Half{}, Half{}, float{});
  if (a == DType::bfloat16 && b == DType::bfloat16) return visit(BFloat16{}, BFloat16{}, BFloat16{}, float{});
  if (a == DType::float32 && b == DType::float16) return visit(float{}, Half{}, float{}, float{});
  if (a == DType::float32 && b == DType::bfloat16) return visit(float{}, BFloat16{}, float{}, float{});
  throw ArgumentError(std::string("out_a of ") + name_of(a) + " with out_b of " + name_of(b) +
                      ": the partials must have one floating dtype, or out_a float32 and out_b float16 or bfloat16");
}

// The checks that both directions share.
Rows rows_of(const Array& out_a, const Array& lse_a, const Array& out_b, const Array& lse_b, bool swapped) {
  require_ndim(out_a, 4);
  require_shape(out_b, out_a.shape);
  const std::vector<std::int64_t> lse_shape =
      swapped ? std::vector<std::int64_t>{out_a.dim(0), out_a.dim(2), out_a.dim(1)}
              : std::vector<std::int64_t>{out_a.dim(0), out_a.dim(1), out_a.dim(2)};
  const DType wide = out_a.dtype == DType::float64 ? DType::float64 : DType::float32;
  for (const Array* lse : {&lse_a, &lse_b}) {
    require_shape(*lse, lse_shape);
    require_dtype(*lse, {wide});
  }
  return {out_a.dim(1), out_a.dim(2), out_a.dim(3), swapped};
}

void require_like(const Array& array, const Array& model) {
  require_shape(array, model.shape);
  require_dtype(array, {model.dtype});
}

void require_apart(std::initializer_list<const Array*> written, std::initializer_list<const Array*> read) {
  for (auto first = written.begin(); first != written.end(); ++first) {
    for (auto second = first + 1; second != written.end(); ++second) require_disjoint(**first, **second);
    for (const Array* other : read) require_disjoint(**first, *other);
  }
}

void lse_merge(const py::tuple& out_a_, const py::tuple& lse_a_, const py::tuple& out_b_, const py::tuple& lse_b_,
               const py::tuple& out_, const py::tuple& lse_, bool swapped) {
  const Array out_a = array_of(out_a_, "out_a"), lse_a = array_of(lse_a_, "lse_a");
  const Array out_b = array_of(out_b_, "out_b"), lse_b = array_of(lse_b_, "lse_b");
  const Array out = array_of(out_, "out"), lse = array_of(lse_, "lse");
  const Rows rows = rows_of(out_a, lse_a, out_b, lse_b, swapped);
  require_like(out, out_a);
  require_like(lse, lse_a);
  // In place, the merge takes the place of the first partial: exactly, or not at all.
  const bool in_place = out.address == out_a.address && lse.address == lse_a.address;
  if (in_place) {
    require_apart({&out, &lse}, {&out_b, &lse_b});
  } else {
    require_apart({&out, &lse}, {&out_a, &lse_a, &out_b, &lse_b});
  }
  const std::int64_t total = lse_a.numel;
  if (total == 0) return;  // then dim may be larger than any memory
  const std::int64_t row_bytes = std::max<std::int64_t>(1, rows.dim * size_of(out.dtype));
  with_types(out_a.dtype, out_b.dtype, [&](auto a, auto b, auto o, auto c) {
    using A = decltype(a);
    using B = decltype(b);
    using O = decltype(o);
    using C = decltype(c);
    py::gil_scoped_release release;
    parallel_for(total, kGrainBytes / row_bytes + 1, [&](std::int64_t begin, std::int64_t end) {
      merge<A, B, O, C>(out_a.data<A>(), lse_a.data<C>(), out_b.data<B>(), lse_b.data<C>(), out.data<O>(), lse.data<C>(), rows,
                        begin, end);
    });
  });
}

void lse_merge_backward(const py::tuple& grad_out_, const py::object& grad_lse_, const py::tuple& out_a_, const py::tuple& lse_a_,
                        const py::tuple& out_b_, const py::tuple& lse_b_, const py::tuple& grad_a_, const py::tuple& grad_lse_a_,
                        const py::tuple& grad_b_, const py::tuple& grad_lse_b_, bool swapped) {
  const Array out_a = array_of(out_a_, "out_a"), lse_a = array_of(lse_a_, "lse_a");
  const Array out_b = array_of(out_b_, "out_b"), lse_b = array_of(lse_b_, "lse_b");
  const Array grad_a = array_of(grad_a_, "grad_out_a"), grad_lse_a = array_of(grad_lse_a_, "grad_lse_a");
  const Array grad_b = array_of(grad_b_, "grad_out_b"), grad_lse_b = array_of(grad_lse_b_, "grad_lse_b");
  const Array grad_out = array_of(grad_out_, "grad_out");
  const bool with_lse = !grad_lse_.is_none();
  const Array grad_lse = with_lse ? array_of(grad_lse_, "grad_lse") : lse_a;
  const Rows rows = rows_of(out_a, lse_a, out_b, lse_b, swapped);
  require_like(grad_out, out_a);
  require_like(grad_lse, lse_a);
  require_like(grad_a, out_a);
  require_like(grad_b, out_b);
  require_like(grad_lse_a, lse_a);
  require_like(grad_lse_b, lse_b);
  require_apart({&grad_a, &grad_lse_a, &grad_b, &grad_lse_b}, {&grad_out, &grad_lse, &out_a, &lse_a, &out_b, &lse_b});
  const std::int64_t total = lse_a.numel;
  if (total == 0) return;  // then dim may be larger than any memory
  const std::int64_t row_bytes = std::max<std::int64_t>(1, rows.dim * size_of(out_a.dtype));
  with_types(out_a.dtype, out_b.dtype, [&](auto a, auto b, auto o, auto c) {
    using A = decltype(a);
    using B = decltype(b);
    using O = decltype(o);
    using C = decltype(c);
    py::gil_scoped_release release;
    parallel_for(total, kGrainBytes / row_bytes + 1, [&](std::int64_t begin, std::int64_t end) {
      merge_backward<A, B, O, C>(grad_out.data<O>(), with_lse ? grad_lse.data<C>() : nullptr, out_a.data<A>(), lse_a.data<C>(),
                                 out_b.data<B>(), lse_b.data<C>(), grad_a.data<A>(), grad_lse_a.data<C>(), grad_b.data<B>(),
                                 grad_lse_b.data<C>(), rows, begin, end);
    });
  });
}

}  // namespace
}  // namespace hp::attention

void register_lse_merge(pybind11::module_& module) {
  namespace py = pybind11;
  module.def("lse_merge", &hp::attention::lse_merge, py::arg("out_a"), py::arg("lse_a"), py::arg("out_b"), py::arg("lse_b"), py::arg("out"),
             py::arg("lse"), py::arg("swapped"), "Write the merge of two attention partials into out and lse.");
  module.def("lse_merge_backward", &hp::attention::lse_merge_backward, py::arg("grad_out"), py::arg("grad_lse"), py::arg("out_a"),
             py::arg("lse_a"), py::arg("out_b"), py::arg("lse_b"), py::arg("grad_out_a"), py::arg("grad_lse_a"),
             py::arg("grad_out_b"), py::arg("grad_lse_b"), py::arg("swapped"), "Write the gradients of both partials.");
}
