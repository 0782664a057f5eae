#include "arguments.h"

namespace hp {

Array array_of(const py::handle& argument, const char* name) {
  if (!PyTuple_Check(argument.ptr()) || PyTuple_GET_SIZE(argument.ptr()) != 4) {
    throw ArgumentError(std::string(name) + ": an array is the tuple (address, bytes, dtype code, shape)");
  }
  Array array{};
  array.name = name;
  std::int64_t available = 0;
  try {
    const auto parts = py::reinterpret_borrow<py::tuple>(argument);
    array.address = parts[0].cast<std::uintptr_t>();
    available = parts[1].cast<std::int64_t>();
    array.dtype = dtype_of(parts[2].cast<int>(), name);
    const auto shape = parts[3].cast<py::sequence>();
    if (shape.size() > 64) throw ArgumentError(std::string(name) + ": an array has at most 64 dims");
    array.shape.reserve(shape.size());
    for (const auto& size : shape) array.shape.push_back(size.cast<std::int64_t>());
  } catch (const py::cast_error&) {
    throw ArgumentError(std::string(name) + ": an array is (address, bytes, dtype code, shape), all integers of 64 bits");
  } catch (const py::error_already_set&) {
    throw ArgumentError(std::string(name) + ": the shape can't be read");
  }
  return checked(std::move(array), available);
}

std::vector<Array> arrays_of(const py::sequence& arguments, const char* name, std::size_t most) {
  if (arguments.size() > most) {
    throw ArgumentError(std::string(name) + ": at most " + std::to_string(most) + " arrays at a time");
  }
  std::vector<Array> arrays;
  arrays.reserve(arguments.size());
  for (const auto& argument : arguments) arrays.push_back(array_of(argument, name));
  return arrays;
}

}  // namespace hp
