// Arrays in memory of somebody else's, and what kernels require of them. Knows neither Python nor a framework.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace hp {

// A call that can't be carried out as asked; Python sees hp_kernels.errors.KernelArgumentError, a ValueError.
class ArgumentError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The codes that hp_kernels/dtypes.py gives to the element types.
enum class DType : int { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3, int32 = 4, int64 = 5, uint8 = 6 };

constexpr int kDTypes = 7;

std::int64_t size_of(DType dtype);
const char* name_of(DType dtype);
// Throws where the code is none.
DType dtype_of(int code, const char* name);

// A dense row-major array in memory of somebody else's, who keeps it alive for the length of the call.
struct Array {
  const char* name;
  std::uintptr_t address;
  std::int64_t bytes;  // what the elements take: numel * size_of(dtype)
  DType dtype;
  std::vector<std::int64_t> shape;
  std::int64_t numel;

  template <typename T>
  T* data() const {
    return reinterpret_cast<T*>(address);
  }
  std::int64_t dim(std::size_t index) const { return shape[index]; }
  std::size_t ndim() const { return shape.size(); }
};

// Fills in numel and bytes, and checks the rest: throws where a size is negative or their product overflows, the elements need
// more than the `available` bytes that their owner holds, the address is null with elements in it, isn't a multiple of the element
// size, or the array would wrap around.
Array checked(Array array, std::int64_t available);

void require_dtype(const Array& array, std::initializer_list<DType> allowed);
void require_shape(const Array& array, const std::vector<std::int64_t>& shape);
void require_ndim(const Array& array, std::size_t ndim);
// What is written may share no byte with anything else that the kernel reads or writes.
void require_disjoint(const Array& first, const Array& second);

// Products and sums of sizes that refuse to overflow.
std::int64_t checked_product(std::int64_t first, std::int64_t second, const char* what);
std::int64_t checked_sum(std::int64_t first, std::int64_t second, const char* what);

std::string text_of(const std::vector<std::int64_t>& shape);

}  // namespace hp
