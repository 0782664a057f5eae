// The threads that kernels share: a loop cut into ranges, one per thread, the caller's own among them.
// Safe to fork: a child begins without workers and starts its own when it first needs them.
#pragma once

#include <cstdint>
#include <functional>

namespace hp {

// How many threads a kernel may use at most, the caller's among them.
int thread_count();

// Sets that number; 0 goes back to what the environment says (HP_KERNELS_THREADS, OMP_NUM_THREADS, processors per rank).
void set_thread_count(int count);

// Calls body(begin, end) on ranges that cover [0, total) once each, on several threads where a range holds at least
// `grain` items, and waits for them. Ranges begin at multiples of `align`. What body throws is thrown here, after all
// ranges have ended. Must be called without the GIL where it may take long.
void parallel_for(std::int64_t total, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body,
                  std::int64_t align = 1);

}  // namespace hp
