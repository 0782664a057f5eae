#include "arrays.h"

namespace hp {

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64:
    case DType::int64:
      return 8;
    case DType::float32:
    case DType::int32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::uint8:
      return 1;
  }
  throw ArgumentError("unknown element type");
}

const char* name_of(DType dtype) {
  static const char* const names[kDTypes] = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"};
  return names[static_cast<int>(dtype)];
}

DType dtype_of(int code, const char* name) {
  if (code < 0 || code >= kDTypes) {
    throw ArgumentError(std::string(name) + ": no element type has the code " + std::to_string(code) +
                        "; hp_kernels.dtypes lists them");
  }
  return static_cast<DType>(code);
}

std::int64_t checked_product(std::int64_t first, std::int64_t second, const char* what) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(first, second, &product)) {
    throw ArgumentError(std::string(what) + ": " + std::to_string(first) + " times " + std::to_string(second) +
                        " is more than 64 bits hold");
  }
  return product;
}

std::int64_t checked_sum(std::int64_t first, std::int64_t second, const char* what) {
  std::int64_t sum = 0;
  if (__builtin_add_overflow(first, second, &sum)) {
    throw ArgumentError(std::string(what) + ": " + std::to_string(first) + " plus " + std::to_string(second) +
                        " is more than 64 bits hold");
  }
  return sum;
}

std::string text_of(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t index = 0; index < shape.size(); ++index) {
    text += (index == 0 ? "" : ", ") + std::to_string(shape[index]);
  }
  return text + "]";
}

Array checked(Array array, std::int64_t available) {
  array.numel = 1;
  for (const std::int64_t size : array.shape) {
    if (size < 0) throw ArgumentError(std::string(array.name) + ": the shape " + text_of(array.shape) + " has a negative size");
    array.numel = checked_product(array.numel, size, array.name);
  }
  const std::int64_t item = size_of(array.dtype);
  array.bytes = checked_product(array.numel, item, array.name);
  if (array.bytes > available) {
    throw ArgumentError(std::string(array.name) + ": " + text_of(array.shape) + " of " + name_of(array.dtype) + " needs " +
                        std::to_string(array.bytes) + " bytes, the memory given holds " + std::to_string(available));
  }
  if (array.numel > 0) {
    if (array.address == 0) throw ArgumentError(std::string(array.name) + ": the address is null");
    if (array.address % static_cast<std::uintptr_t>(item) != 0) {
      throw ArgumentError(std::string(array.name) + ": the address isn't a multiple of the " + std::to_string(item) +
                          " bytes of an element of " + name_of(array.dtype));
    }
    if (array.address + static_cast<std::uintptr_t>(array.bytes) < array.address) {
      throw ArgumentError(std::string(array.name) + ": the array would go past the end of the address space");
    }
  }
  return array;
}

void require_dtype(const Array& array, std::initializer_list<DType> allowed) {
  std::string names;
  for (const DType dtype : allowed) {
    if (array.dtype == dtype) return;
    names += (names.empty() ? "" : ", ") + std::string(name_of(dtype));
  }
  throw ArgumentError(std::string(array.name) + ": must be " + names + ", not " + name_of(array.dtype));
}

void require_shape(const Array& array, const std::vector<std::int64_t>& shape) {
  if (array.shape != shape) {
    throw ArgumentError(std::string(array.name) + ": must have the shape " + text_of(shape) + ", not " + text_of(array.shape));
  }
}

void require_ndim(const Array& array, std::size_t ndim) {
  if (array.ndim() != ndim) {
    throw ArgumentError(std::string(array.name) + ": must have " + std::to_string(ndim) + " dims, not the shape " +
                        text_of(array.shape));
  }
}

void require_disjoint(const Array& first, const Array& second) {
  if (first.bytes == 0 || second.bytes == 0) return;
  const bool apart = first.address + static_cast<std::uintptr_t>(first.bytes) <= second.address ||
                     second.address + static_cast<std::uintptr_t>(second.bytes) <= first.address;
  if (!apart) {
    throw ArgumentError(std::string(first.name) + " and " + second.name + " share memory; give one of them memory of its own");
  }
}

}  // namespace hp
