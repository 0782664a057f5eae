// Conversions between the floating-point types, to nearest even, without branches so that loops over them become vector code.
// A NaN stays a quiet NaN of its sign; infinities, zeros and subnormal numbers are as IEEE 754 has them.
#pragma once

#include <cstdint>
#include <cstring>

#include "instruction_sets.h"

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the first of two neighbours is taken to be in the lower half of a word"
#endif

namespace hp {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

HP_INLINE std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

HP_INLINE float float_of_bits(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

HP_INLINE float to_float(BFloat16 value) { return float_of_bits(static_cast<std::uint32_t>(value.bits) << 16); }

HP_INLINE float to_float(Half value) {
  const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x8000u) << 16;
  const std::uint32_t rest = static_cast<std::uint32_t>(value.bits & 0x7fffu) << 13;
  // An ordinary number gets the longer exponent's bias; a subnormal one is the distance of two numbers that share an exponent.
  const std::uint32_t ordinary = rest + ((127u - 15u) << 23);
  const std::uint32_t small = bits_of(float_of_bits(rest + (113u << 23)) - float_of_bits(113u << 23));
  const std::uint32_t special = rest | 0x7f800000u | (rest > 0x0f800000u ? 0x00400000u : 0u);
  const std::uint32_t magnitude = rest < 0x00800000u ? small : (rest >= 0x0f800000u ? special : ordinary);
  return float_of_bits(sign | magnitude);
}

HP_INLINE float to_float(float value) { return value; }

// The upper 16 of 32 bits are the rounded number; the lower ones are left over.
HP_INLINE std::uint32_t bfloat_above(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return value != value ? bits | 0x00400000u : rounded;
}

HP_INLINE BFloat16 to_bfloat(float value) { return {static_cast<std::uint16_t>(bfloat_above(value) >> 16)}; }

// Two neighbours in a row of bfloat16 as one word, in which both are widened and rounded where they are: loops over such pairs
// move nothing between the lanes of vectors, which is most of what loops over single elements do.
HP_INLINE std::uint32_t pair_at(const BFloat16* row) {
  std::uint32_t pair;
  std::memcpy(&pair, row, sizeof(pair));
  return pair;
}

HP_INLINE float first_of(std::uint32_t pair) { return float_of_bits(pair << 16); }
HP_INLINE float second_of(std::uint32_t pair) { return float_of_bits(pair & 0xffff0000u); }

HP_INLINE void set_pair(BFloat16* row, float first, float second) {
  const std::uint32_t pair = (bfloat_above(first) >> 16) | (bfloat_above(second) & 0xffff0000u);
  std::memcpy(row, &pair, sizeof(pair));
}

HP_INLINE Half to_half(float value) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  // From 2^-14 on: drop 13 bits, rounding; a carry into the exponent is right, up to infinity.
  const std::uint32_t rounded = (rest - ((127u - 15u) << 23) + 0x0fffu + ((rest >> 13) & 1u)) >> 13;
  // Below: adding 1/2 leaves the multiple of 2^-24 in the last bits, rounded by the addition.
  const std::uint32_t small = bits_of(float_of_bits(rest) + 0.5f) - bits_of(0.5f);
  const std::uint32_t special = rest > 0x7f800000u ? (0x7e00u | ((rest >> 13) & 0x03ffu)) : 0x7c00u;
  const std::uint32_t magnitude = rest < 0x38800000u ? small : (rest >= 0x47800000u ? special : rounded);
  return {static_cast<std::uint16_t>(sign | magnitude)};
}

// The type that a type is computed in.
template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

HP_INLINE float widen(Half value) { return to_float(value); }
HP_INLINE float widen(BFloat16 value) { return to_float(value); }
HP_INLINE float widen(float value) { return value; }
HP_INLINE double widen(double value) { return value; }

// A number rounded to the type of `out`; a double goes to the short types by way of float32, as frameworks do.
HP_INLINE void narrow(double value, double& out) { out = value; }
HP_INLINE void narrow(double value, float& out) { out = static_cast<float>(value); }
HP_INLINE void narrow(float value, double& out) { out = value; }
HP_INLINE void narrow(float value, float& out) { out = value; }
HP_INLINE void narrow(float value, Half& out) { out = to_half(value); }
HP_INLINE void narrow(float value, BFloat16& out) { out = to_bfloat(value); }
HP_INLINE void narrow(double value, Half& out) { out = to_half(static_cast<float>(value)); }
HP_INLINE void narrow(double value, BFloat16& out) { out = to_bfloat(static_cast<float>(value)); }

}  // namespace hp
