// What crosses the boundary from Python: arrays as (address, bytes, dtype, shape), checked before anything is read.
// `bytes` is what the owner holds from that address on, so that a wrong shape is an error and never a walk off the end.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arrays.h"

namespace hp {

namespace py = pybind11;

// Reads and checks (address, bytes, dtype code, shape); `name` must outlive the array (a literal).
// Throws where the tuple isn't one, a size is negative or their product overflows, the elements need more than `bytes`,
// the address is null with elements in it, isn't a multiple of the element size, or wraps around.
Array array_of(const py::handle& argument, const char* name);

// Arrays of a sequence of such tuples, at most `most`.
std::vector<Array> arrays_of(const py::sequence& arguments, const char* name, std::size_t most = 1u << 20);

}  // namespace hp
