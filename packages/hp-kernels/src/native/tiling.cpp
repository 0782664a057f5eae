// The tilings of the CANN kernels (cann/tiling), for the tests and for whoever wants to know how a shape is cut on an NPU.
#include "../../cann/tiling/lse_merge_tiling.h"
#include "../../cann/tiling/permute_tiling.h"

#include "arguments.h"

namespace hp::tiling {
namespace {

// Sizes of tensors that exist; with three of them the tilings' products stay inside 64 bits.
std::uint64_t size_from(std::int64_t value, const char* name) {
  if (value < 0 || value > (std::int64_t{1} << 40)) throw ArgumentError(std::string(name) + ": " + std::to_string(value) + " is no size");
  return static_cast<std::uint64_t>(value);
}

void add_split(py::dict& fields, const hp_cann::Split& split) {
  fields["cores"] = split.cores;
  fields["longer"] = split.longer;
  fields["tiles_per_core"] = split.tiles_per_core;
}

std::uint32_t cores_from(std::int64_t cores) {
  if (cores < 0 || cores > 4096) throw ArgumentError("cores: " + std::to_string(cores) + " is no number of cores");
  return static_cast<std::uint32_t>(cores);
}

py::object lse_merge(std::int64_t outer, std::int64_t middle, std::int64_t inner, bool swapped, std::int64_t dim,
                     std::int64_t item_bytes, std::int64_t cores, std::int64_t unified_bytes) {
  checked_product(checked_product(checked_product(outer, middle, "rows"), inner, "rows"), checked_product(dim, 8, "dim"), "out");
  hp_cann::LseMergeTiling tiling;
  if (!hp_cann::lse_merge_tiling(size_from(outer, "outer"), size_from(middle, "middle"), size_from(inner, "inner"), swapped,
                                 size_from(dim, "dim"), size_from(item_bytes, "item_bytes"), cores_from(cores),
                                 size_from(unified_bytes, "unified_bytes"), tiling)) {
    return py::none();
  }
  py::dict fields;
  fields["groups"] = tiling.groups;
  fields["rows_per_group"] = tiling.rows_per_group;
  fields["inner"] = tiling.inner;
  fields["tiles_per_group"] = tiling.tiles_per_group;
  fields["tile_rows"] = tiling.tile_rows;
  fields["dim_tile"] = tiling.dim_tile;
  fields["row_elements"] = tiling.row_elements;
  fields["unified_bytes"] = tiling.unified_bytes;
  add_split(fields, tiling.split);
  return fields;
}

py::object permute(std::int64_t tokens, std::int64_t top_k, std::int64_t dim, std::int64_t item_bytes, bool combine, bool weighted,
                   std::int64_t cores, std::int64_t unified_bytes) {
  checked_product(checked_product(tokens, top_k, "rows"), checked_product(dim, 8, "dim"), "permuted");
  hp_cann::PermuteTiling tiling;
  if (!hp_cann::permute_tiling(size_from(tokens, "tokens"), size_from(top_k, "top_k"), size_from(dim, "dim"),
                               size_from(item_bytes, "item_bytes"), combine, weighted, cores_from(cores),
                               size_from(unified_bytes, "unified_bytes"), tiling)) {
    return py::none();
  }
  py::dict fields;
  fields["tile_tokens"] = tiling.tile_tokens;
  fields["dim_tile"] = tiling.dim_tile;
  fields["row_elements"] = tiling.row_elements;
  fields["unified_bytes"] = tiling.unified_bytes;
  add_split(fields, tiling.split);
  return fields;
}

}  // namespace
}  // namespace hp::tiling

void register_tiling(pybind11::module_& module) {
  namespace py = pybind11;
  module.def("lse_merge_tiling", &hp::tiling::lse_merge, py::arg("outer"), py::arg("middle"), py::arg("inner"), py::arg("swapped"),
             py::arg("dim"), py::arg("item_bytes"), py::arg("cores"), py::arg("unified_bytes"),
             "How the merge of two attention partials is cut for the vector cores of an NPU; None where it can't be.");
  module.def("permute_tiling", &hp::tiling::permute, py::arg("tokens"), py::arg("top_k"), py::arg("dim"), py::arg("item_bytes"),
             py::arg("combine"), py::arg("weighted"), py::arg("cores"), py::arg("unified_bytes"),
             "How dispatch or combine is cut for the vector cores of an NPU; None where it can't be.");
}
