// Rows written past the caches: what is too large to be there when it is read need not push out what is, and a line that is
// written whole need not be read first, which is a third of the traffic of a copy.
#pragma once

#include <cstdint>
#include <cstring>

#include "instruction_sets.h"

#if defined(HP_HAS_VARIANTS)
#include <immintrin.h>
#elif defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace hp {

// Results from this size on are streamed: beyond the caches of one processor core.
constexpr std::int64_t kStreamBytes = 8 << 20;

// Rows ahead are fetched up to this size, which leaves room for everything else in the second cache.
constexpr std::size_t kFetchBytes = 64 << 10;

// Has a row on its way to the second cache while another is worked on: at the start of a row in a place of its own, processors
// don't know yet what comes.
HP_INLINE void fetch_row(const void* row, std::size_t bytes) {
  const auto* line = static_cast<const char*>(row);
  for (std::size_t i = 0; i < (bytes < kFetchBytes ? bytes : kFetchBytes); i += 64) __builtin_prefetch(line + i, 0, 2);
}

#ifdef HP_HAS_VARIANTS
// A line at a time. What is left of the row is less than one.
HP_AVX512 inline std::size_t stream_lines(char* target, const char* source, std::size_t bytes) {
  std::size_t done = 0;
  for (; done + sizeof(__m512i) <= bytes; done += sizeof(__m512i)) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + done), _mm512_loadu_si512(source + done));
  }
  return done;
}
#endif

// Copies a row; to memory that the caches take no note of where that can be done. stream_end() must follow in the same thread.
HP_INLINE void stream_row(void* target_, const void* source_, std::size_t bytes) {
  auto* target = static_cast<char*>(target_);
  const auto* source = static_cast<const char*>(source_);
  std::size_t done = 0;
#ifdef HP_HAS_VARIANTS
  if (reinterpret_cast<std::uintptr_t>(target) % sizeof(__m512i) == 0 &&
      instruction_set.load(std::memory_order_relaxed) >= InstructionSet::avx512) {
    done = stream_lines(target, source, bytes);
  }
#endif
#if defined(__x86_64__)
  if (reinterpret_cast<std::uintptr_t>(target) % sizeof(__m128i) == 0) {
    for (; done + sizeof(__m128i) <= bytes; done += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(target + done),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + done)));
    }
  }
#endif
  std::memcpy(target + done, source + done, bytes - done);
}

// Orders the streamed writes before everything that follows.
HP_INLINE void stream_end() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace hp
