#include "half_rows.h"

#ifdef HP_HAS_VARIANTS
#include <immintrin.h>
#endif

namespace hp {

namespace {

constexpr std::int64_t kHalfLanes = 16;  // that products are summed in, as for the other types

}  // namespace

#ifdef HP_HAS_VARIANTS

namespace {

// Every processor with AVX2 has these instructions.
#define HP_HALVES __attribute__((target("avx2,f16c")))

// Of 16 elements; the forms without a mask warn of an uninitialised variable of GCC 12's own header.
constexpr __mmask16 kAll = 0xffff;
constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

HP_HALVES std::int64_t widen_wholes(const Half* source, float* target, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(target + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
  }
  return i;
}

HP_AVX512 std::int64_t widen_lines(const Half* source, float* target, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    _mm512_storeu_ps(target + i, _mm512_maskz_cvtph_ps(kAll, halves));
  }
  return i;
}

HP_HALVES std::int64_t narrow_wholes(const float* source, Half* target, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), kToNearest);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), halves);
  }
  return i;
}

HP_AVX512 std::int64_t narrow_lines(const float* source, Half* target, std::int64_t count) {
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 row = _mm512_loadu_ps(source + i);
    const __m256i halves = _mm512_maskz_cvtps_ph(kAll, row, kToNearest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + i), halves);
  }
  return i;
}

HP_HALVES std::int64_t merge_wholes(const Half* a, const Half* b, Half* out, std::int64_t count, float weight_a, float weight_b) {
  const __m256 first = _mm256_set1_ps(weight_a), second = _mm256_set1_ps(weight_b);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 wide_a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + i)));
    const __m256 wide_b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + i)));
    const __m256 sum = _mm256_add_ps(_mm256_mul_ps(wide_a, first), _mm256_mul_ps(wide_b, second));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm256_cvtps_ph(sum, kToNearest));
  }
  return i;
}

HP_AVX512 std::int64_t merge_lines(const Half* a, const Half* b, Half* out, std::int64_t count, float weight_a, float weight_b) {
  const __m512 first = _mm512_set1_ps(weight_a), second = _mm512_set1_ps(weight_b);
  std::int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    const __m512 wide_a = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i)));
    const __m512 wide_b = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i)));
    const __m512 sum = _mm512_add_ps(_mm512_mul_ps(wide_a, first), _mm512_mul_ps(wide_b, second));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm512_maskz_cvtps_ph(kAll, sum, kToNearest));
  }
  return i;
}

// `lanes` takes up the products of the elements at multiples of 16 and after, one by one.
HP_HALVES std::int64_t backward_wholes(const Half* grad, const Half* a, const Half* b, Half* grad_a, Half* grad_b,
                                       std::int64_t count, float weight_a, float weight_b, float* lanes) {
  const __m256 first = _mm256_set1_ps(weight_a), second = _mm256_set1_ps(weight_b);
  __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
  std::int64_t i = 0;
  for (; i + kHalfLanes <= count; i += kHalfLanes) {
    for (int part = 0; part < 2; ++part) {
      const std::int64_t at = i + 8 * part;
      const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(grad + at)));
      const __m256 wide_a = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(a + at)));
      const __m256 wide_b = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(b + at)));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(grad_a + at), _mm256_cvtps_ph(_mm256_mul_ps(value, first), kToNearest));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(grad_b + at), _mm256_cvtps_ph(_mm256_mul_ps(value, second), kToNearest));
      sums[part] = _mm256_add_ps(sums[part], _mm256_mul_ps(value, _mm256_sub_ps(wide_a, wide_b)));
    }
  }
  _mm256_storeu_ps(lanes, sums[0]);
  _mm256_storeu_ps(lanes + 8, sums[1]);
  return i;
}

HP_AVX512 std::int64_t backward_lines(const Half* grad, const Half* a, const Half* b, Half* grad_a, Half* grad_b,
                                      std::int64_t count, float weight_a, float weight_b, float* lanes) {
  const __m512 first = _mm512_set1_ps(weight_a), second = _mm512_set1_ps(weight_b);
  __m512 sums = _mm512_setzero_ps();
  std::int64_t i = 0;
  for (; i + kHalfLanes <= count; i += kHalfLanes) {
    const __m512 value = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(grad + i)));
    const __m512 wide_a = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + i)));
    const __m512 wide_b = _mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + i)));
    const __m256i scaled_a = _mm512_maskz_cvtps_ph(kAll, _mm512_mul_ps(value, first), kToNearest);
    const __m256i scaled_b = _mm512_maskz_cvtps_ph(kAll, _mm512_mul_ps(value, second), kToNearest);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_a + i), scaled_a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(grad_b + i), scaled_b);
    sums = _mm512_add_ps(sums, _mm512_mul_ps(value, _mm512_sub_ps(wide_a, wide_b)));
  }
  _mm512_storeu_ps(lanes, sums);
  return i;
}

}  // namespace

#endif

namespace {

#if defined(__aarch64__)
// By way of the hardware's type, whose conversions compilers vectorise; memory holds the same 16 bits.
HP_INLINE float loaded(const Half* place) { return static_cast<float>(*reinterpret_cast<const __fp16*>(place)); }
HP_INLINE void store(float value, Half* place) { *reinterpret_cast<__fp16*>(place) = static_cast<__fp16>(value); }
#else
HP_INLINE float loaded(const Half* place) { return widen(*place); }
HP_INLINE void store(float value, Half* place) { narrow(value, *place); }
#endif

}  // namespace

void widen_row(const Half* source, float* target, std::int64_t count) {
  std::int64_t i = 0;
#ifdef HP_HAS_VARIANTS
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  if (set >= InstructionSet::avx512) i = widen_lines(source, target, count);
  if (set >= InstructionSet::avx2) i += widen_wholes(source + i, target + i, count - i);
#endif
  for (; i < count; ++i) target[i] = loaded(source + i);
}

void narrow_row(const float* source, Half* target, std::int64_t count) {
  std::int64_t i = 0;
#ifdef HP_HAS_VARIANTS
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  if (set >= InstructionSet::avx512) i = narrow_lines(source, target, count);
  if (set >= InstructionSet::avx2) i += narrow_wholes(source + i, target + i, count - i);
#endif
  for (; i < count; ++i) store(source[i], target + i);
}

void merge_halves(const Half* a, const Half* b, Half* out, std::int64_t count, float weight_a, float weight_b) {
  std::int64_t i = 0;
#ifdef HP_HAS_VARIANTS
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  if (set >= InstructionSet::avx512) i = merge_lines(a, b, out, count, weight_a, weight_b);
  if (set >= InstructionSet::avx2) i += merge_wholes(a + i, b + i, out + i, count - i, weight_a, weight_b);
#endif
#pragma GCC ivdep
  for (; i < count; ++i) store(loaded(a + i) * weight_a + loaded(b + i) * weight_b, out + i);
}

float merge_halves_backward(const Half* grad, const Half* a, const Half* b, Half* grad_a, Half* grad_b, std::int64_t count,
                            float weight_a, float weight_b) {
  float lanes[kHalfLanes] = {};
  std::int64_t i = 0;
#ifdef HP_HAS_VARIANTS
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  if (set >= InstructionSet::avx512) {
    i = backward_lines(grad, a, b, grad_a, grad_b, count, weight_a, weight_b, lanes);
  } else if (set >= InstructionSet::avx2) {
    i = backward_wholes(grad, a, b, grad_a, grad_b, count, weight_a, weight_b, lanes);
  }
#endif
  const auto add = [&](std::int64_t at, float& lane) __attribute__((always_inline)) {
    const float value = loaded(grad + at);
    store(value * weight_a, grad_a + at);
    store(value * weight_b, grad_b + at);
    lane += value * (loaded(a + at) - loaded(b + at));
  };
  for (; i + kHalfLanes <= count; i += kHalfLanes) {
#pragma GCC ivdep
    for (std::int64_t j = 0; j < kHalfLanes; ++j) add(i + j, lanes[j]);
  }
  for (std::int64_t j = 0; i < count; ++i, ++j) add(i, lanes[j]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  return sum;
}

}  // namespace hp
