#include "half_rows.h"

#ifdef HP_HAS_VARIANTS
#include <immintrin.h>
#endif

namespace hp {

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

}  // namespace

void widen_row(const Half* source, float* target, std::int64_t count) {
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  std::int64_t i = set >= InstructionSet::avx512 ? widen_lines(source, target, count) : 0;
  if (set >= InstructionSet::avx2) i += widen_wholes(source + i, target + i, count - i);
  for (; i < count; ++i) target[i] = widen(source[i]);
}

void narrow_row(const float* source, Half* target, std::int64_t count) {
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  std::int64_t i = set >= InstructionSet::avx512 ? narrow_lines(source, target, count) : 0;
  if (set >= InstructionSet::avx2) i += narrow_wholes(source + i, target + i, count - i);
  for (; i < count; ++i) narrow(source[i], target[i]);
}

void merge_halves(const Half* a, const Half* b, Half* out, std::int64_t count, float weight_a, float weight_b) {
  const InstructionSet set = instruction_set.load(std::memory_order_relaxed);
  std::int64_t i = set >= InstructionSet::avx512 ? merge_lines(a, b, out, count, weight_a, weight_b) : 0;
  if (set >= InstructionSet::avx2) i += merge_wholes(a + i, b + i, out + i, count - i, weight_a, weight_b);
  for (; i < count; ++i) narrow(widen(a[i]) * weight_a + widen(b[i]) * weight_b, out[i]);
}

#elif defined(__aarch64__)

// The type of the hardware, which compilers vectorise; memory holds the same 16 bits.
void widen_row(const Half* source, float* target, std::int64_t count) {
  const __fp16* halves = reinterpret_cast<const __fp16*>(source);
  for (std::int64_t i = 0; i < count; ++i) target[i] = static_cast<float>(halves[i]);
}

void narrow_row(const float* source, Half* target, std::int64_t count) {
  __fp16* halves = reinterpret_cast<__fp16*>(target);
  for (std::int64_t i = 0; i < count; ++i) halves[i] = static_cast<__fp16>(source[i]);
}

void merge_halves(const Half* a, const Half* b, Half* out, std::int64_t count, float weight_a, float weight_b) {
  const __fp16 *halves_a = reinterpret_cast<const __fp16*>(a), *halves_b = reinterpret_cast<const __fp16*>(b);
  __fp16* halves = reinterpret_cast<__fp16*>(out);
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) {
    halves[i] = static_cast<__fp16>(static_cast<float>(halves_a[i]) * weight_a + static_cast<float>(halves_b[i]) * weight_b);
  }
}

#else

void widen_row(const Half* source, float* target, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) target[i] = widen(source[i]);
}

void narrow_row(const float* source, Half* target, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) narrow(source[i], target[i]);
}

void merge_halves(const Half* a, const Half* b, Half* out, std::int64_t count, float weight_a, float weight_b) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < count; ++i) narrow(widen(a[i]) * weight_a + widen(b[i]) * weight_b, out[i]);
}

#endif

}  // namespace hp
