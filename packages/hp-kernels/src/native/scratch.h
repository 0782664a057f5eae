// Working memory of a kernel that begins with a cache line: the widest vectors then never lie across two, which would cost twice.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace hp {

constexpr std::size_t kLineBytes = 64;

// `count` elements, of no value yet; numbers and what is made of them only.
template <typename T>
class Scratch {
 public:
  explicit Scratch(std::size_t count)
      : memory_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t{kLineBytes}))) {}

  T* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(T* memory) const { ::operator delete(memory, std::align_val_t{kLineBytes}); }
  };

  std::unique_ptr<T, Free> memory_;
};

// How many elements on the next row of a table in such memory begins, where rows have `count`.
template <typename T>
constexpr std::size_t line_stride(std::size_t count) {
  constexpr std::size_t per_line = kLineBytes / sizeof(T);
  return (count + per_line - 1) / per_line * per_line;
}

}  // namespace hp
