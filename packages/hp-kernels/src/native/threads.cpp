#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>

namespace hp {
namespace {

constexpr int kMost = 256;

// A positive number from the environment, or 0.
int from_environment(const char* name) {
  const char* text = std::getenv(name);
  if (text == nullptr) return 0;
  char* end = nullptr;
  const long value = std::strtol(text, &end, 10);
  return end == text || value < 1 ? 0 : static_cast<int>(std::min<long>(value, kMost));
}

int processors() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0) return std::max(1, CPU_COUNT(&allowed));
  return std::max(1u, std::thread::hardware_concurrency());
}

int default_count() {
  for (const char* name : {"HP_KERNELS_THREADS", "OMP_NUM_THREADS"}) {
    if (const int count = from_environment(name)) return count;
  }
  // The ranks of one machine share its processors; torchrun says how many there are.
  const int ranks = std::max(1, from_environment("LOCAL_WORLD_SIZE"));
  return std::clamp(processors() / ranks, 1, kMost);
}

thread_local bool inside_a_range = false;

// Workers that wait for one job at a time. It is never destroyed: at exit, and in a forked child, workers may not be there
// to be joined.
class Pool {
 public:
  // Runs part(0), ..., part(parts - 1), each once; false if another thread's job is running.
  bool run(int parts, const std::function<void(int)>& part) {
    std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    std::unique_lock<std::mutex> lock(state_);
    try {
      while (workers_ < parts - 1) {
        std::thread([this] { work(); }).detach();
        ++workers_;
      }
    } catch (const std::exception&) {
      // The system gives no more threads: those that there are do the job.
    }
    part_ = &part;
    next_ = 0;
    parts_ = left_ = parts;
    lock.unlock();
    wake_.notify_all();
    take_parts();
    lock.lock();
    done_.wait(lock, [this] { return left_ == 0; });
    part_ = nullptr;
    return true;
  }

 private:
  void work() {
    while (true) {
      {
        std::unique_lock<std::mutex> lock(state_);
        wake_.wait(lock, [this] { return part_ != nullptr && next_ < parts_; });
      }
      take_parts();
    }
  }

  void take_parts() {
    while (true) {
      std::unique_lock<std::mutex> lock(state_);
      if (part_ == nullptr || next_ >= parts_) return;
      const int index = next_++;
      const auto& part = *part_;
      lock.unlock();
      part(index);
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_, state_;
  std::condition_variable wake_, done_;
  const std::function<void(int)>* part_ = nullptr;
  int workers_ = 0, parts_ = 0, next_ = 0, left_ = 0;
};

std::atomic<int> chosen_count{0};
std::atomic<Pool*> the_pool{nullptr};
std::once_flag fork_handler;

Pool& pool() {
  std::call_once(fork_handler, [] {
    // Only the thread that forked lives on in the child, whatever the workers held: the child leaves their pool behind.
    pthread_atfork(nullptr, nullptr, [] { the_pool.store(nullptr); });
  });
  Pool* found = the_pool.load();
  if (found == nullptr) {
    Pool* made = new Pool();
    if (the_pool.compare_exchange_strong(found, made)) return *made;
    delete made;
  }
  return *found;
}

}  // namespace

int thread_count() {
  int count = chosen_count.load();
  if (count == 0) {
    count = default_count();
    chosen_count.store(count);
  }
  return count;
}

void set_thread_count(int count) { chosen_count.store(std::clamp(count, 0, kMost)); }

void parallel_for(std::int64_t total, std::int64_t grain, const std::function<void(std::int64_t, std::int64_t)>& body,
                  std::int64_t align) {
  if (total <= 0) return;
  const std::int64_t most = std::max<std::int64_t>(1, total / std::max<std::int64_t>(1, grain));
  const int parts = static_cast<int>(std::min<std::int64_t>(most, thread_count()));
  if (parts == 1 || inside_a_range) {
    body(0, total);
    return;
  }
  std::mutex failure_lock;
  std::exception_ptr failure;
  const std::int64_t units = (total + align - 1) / align;
  const auto part = [&](int index) {
    inside_a_range = true;
    try {
      const std::int64_t begin = units / parts * index + std::min<std::int64_t>(index, units % parts);
      const std::int64_t end = begin + units / parts + (index < units % parts ? 1 : 0);
      if (begin < end) body(begin * align, std::min(end * align, total));
    } catch (...) {
      std::lock_guard<std::mutex> lock(failure_lock);
      failure = std::current_exception();
    }
    inside_a_range = false;
  };
  if (!pool().run(parts, part)) {
    body(0, total);
    return;
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace hp
