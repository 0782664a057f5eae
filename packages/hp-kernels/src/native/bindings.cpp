// Philox and packing as functions of the module: arguments are read with the GIL, the work is done without it.
#include "arguments.h"
#include "pack.h"
#include "philox.h"

namespace hp::bindings {
namespace {

void pack(const py::tuple& flat, const std::vector<std::int64_t>& offsets, const py::sequence& tensors) {
  const Array into = array_of(flat, "flat");
  const std::vector<Array> arrays = arrays_of(tensors, "tensors");
  const py::gil_scoped_release released;
  hp::pack::pack(into, offsets, arrays);
}

void unpack(const py::sequence& tensors, const py::tuple& flat, const std::vector<std::int64_t>& offsets) {
  const Array from = array_of(flat, "flat");
  const std::vector<Array> arrays = arrays_of(tensors, "tensors");
  const py::gil_scoped_release released;
  hp::pack::unpack(arrays, from, offsets);
}

void cast(const py::sequence& targets, const py::sequence& sources) {
  const std::vector<Array> to = arrays_of(targets, "targets");
  const std::vector<Array> from = arrays_of(sources, "sources");
  const py::gil_scoped_release released;
  hp::pack::cast(to, from);
}

void fill(const py::tuple& out, philox::Kind kind, const std::vector<std::int64_t>& shape, const philox::Bounds& box,
          std::uint64_t seed, std::uint64_t offset, double probability) {
  const Array into = array_of(out, "out");
  const py::gil_scoped_release released;
  philox::fill(into, kind, shape, box, seed, offset, probability);
}

}  // namespace
}  // namespace hp::bindings

void register_pack(pybind11::module_& module) {
  namespace py = pybind11;
  module.def("pack", &hp::bindings::pack, py::arg("flat"), py::arg("offsets"), py::arg("tensors"),
             "Copy each array to its offset (in elements) of a flat one, converting the element type.");
  module.def("unpack", &hp::bindings::unpack, py::arg("tensors"), py::arg("flat"), py::arg("offsets"),
             "Copy parts of a flat array to arrays, converting the element type.");
  module.def("cast", &hp::bindings::cast, py::arg("targets"), py::arg("sources"),
             "Copy arrays to others of the same shapes, converting the element type.");
}

void register_philox(pybind11::module_& module) {
  namespace py = pybind11;
  using hp::philox::Bounds;
  using hp::philox::Kind;
  const auto define = [&](const char* name, Kind kind, const char* doc) {
    module.def(
        name,
        [kind](const py::tuple& out, const std::vector<std::int64_t>& shape, const Bounds& box, std::uint64_t seed,
               std::uint64_t offset) { hp::bindings::fill(out, kind, shape, box, seed, offset, 0.0); },
        py::arg("out"), py::arg("global_shape"), py::arg("box"), py::arg("seed"), py::arg("offset"), doc);
  };
  define("philox_uniform", Kind::uniform, "Fill an array with its box of a global tensor of uniform numbers.");
  define("philox_normal", Kind::normal, "Fill an array with its box of a global tensor of normal numbers.");
  module.def(
      "philox_keep",
      [](const py::tuple& out, const std::vector<std::int64_t>& shape, const Bounds& box, std::uint64_t seed,
         std::uint64_t offset, double p) { hp::bindings::fill(out, Kind::keep, shape, box, seed, offset, p); },
      py::arg("out"), py::arg("global_shape"), py::arg("box"), py::arg("seed"), py::arg("offset"), py::arg("p"),
      "Fill a uint8 array with 1 where the uniform float32 number is at least p, else 0.");
}
