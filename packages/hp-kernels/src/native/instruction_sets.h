// The inner loops, compiled for several instruction sets; the best that the processor has is asked for once, when the library is
// loaded. All give the same bits, because nothing is contracted or reordered (-ffp-contract=off, no -ffast-math). By our own hand
// and not by target_clones, which can't choose AVX-512BW on GCC 10 to 12, where 16-bit elements need it.
#pragma once

#include <atomic>

#define HP_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HP_HAS_VARIANTS 1
#endif

namespace hp {

// From the least to the best; each has what the ones before it have.
enum class InstructionSet : int { baseline, avx2, avx512 };

HP_INLINE InstructionSet best_instruction_set() {
#ifdef HP_HAS_VARIANTS
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::avx512;
  }
  if (__builtin_cpu_supports("avx2")) return InstructionSet::avx2;
#endif
  return InstructionSet::baseline;
}

// What the loops use; tests set a lesser one to compare.
inline std::atomic<InstructionSet> instruction_set{best_instruction_set()};

}  // namespace hp

// Defines `RESULT NAME PARAMETERS { return <the rest>; }`, where the rest calls an HP_INLINE function that holds the loop. A macro,
// as the attributes can't be given to templates' instances.
#ifdef HP_HAS_VARIANTS
#define HP_AVX2 __attribute__((target("avx2")))
#define HP_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#define HP_VARIANTS(RESULT, NAME, PARAMETERS, ARGUMENTS, ...)                        \
  HP_AVX512 RESULT NAME##_avx512 PARAMETERS { return __VA_ARGS__; }                  \
  HP_AVX2 RESULT NAME##_avx2 PARAMETERS { return __VA_ARGS__; }                      \
  RESULT NAME##_baseline PARAMETERS { return __VA_ARGS__; }                          \
  HP_INLINE RESULT NAME PARAMETERS {                                                 \
    switch (::hp::instruction_set.load(std::memory_order_relaxed)) {                 \
      case ::hp::InstructionSet::avx512:                                             \
        return NAME##_avx512 ARGUMENTS;                                              \
      case ::hp::InstructionSet::avx2:                                               \
        return NAME##_avx2 ARGUMENTS;                                                \
      default:                                                                       \
        return NAME##_baseline ARGUMENTS;                                            \
    }                                                                                \
  }
#else
#define HP_VARIANTS(RESULT, NAME, PARAMETERS, ARGUMENTS, ...) \
  RESULT NAME PARAMETERS { return __VA_ARGS__; }
#endif
