// The torch ops that write to tensors, registered from C++ for the CPU: the same checks and kernels without Python in between.
// On torch's stable ABI from torch 2.10 on (HP_TORCH_STABLE), so that one build serves later versions; before, on its C++ API.
// Ops, fakes and gradients are defined in platform/torch. Errors reach Python as RuntimeError; that side makes its own of them.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef HP_TORCH_STABLE
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#else
#include <ATen/ATen.h>
#include <torch/library.h>
#endif

#include "../arrays.h"
#include "../pack.h"
#include "../philox.h"

namespace {

#ifdef HP_TORCH_STABLE
using Tensor = torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Integers = std::vector<std::int64_t>;
using ScalarType = torch::headeronly::ScalarType;
using Text = std::string;

std::int64_t held_by(const Tensor& tensor, std::int64_t item) {
  std::int64_t bytes = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
  return bytes - tensor.storage_offset() * item;
}
#else
using Tensor = at::Tensor;
using Tensors = std::vector<at::Tensor>;
using Integers = std::vector<std::int64_t>;
using ScalarType = at::ScalarType;
using Text = std::string;

std::int64_t held_by(const Tensor& tensor, std::int64_t item) {
  return static_cast<std::int64_t>(tensor.storage().nbytes()) - tensor.storage_offset() * item;
}
#endif

hp::DType dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return hp::DType::float32;
    case ScalarType::Double:
      return hp::DType::float64;
    case ScalarType::Half:
      return hp::DType::float16;
    case ScalarType::BFloat16:
      return hp::DType::bfloat16;
    case ScalarType::Int:
      return hp::DType::int32;
    case ScalarType::Long:
      return hp::DType::int64;
    case ScalarType::Byte:
    case ScalarType::Bool:
      return hp::DType::uint8;
    default:
      throw hp::ArgumentError(std::string(name) + ": no kernel takes elements of this type");
  }
}

hp::Array array_of(const Tensor& tensor, const char* name) {
  if (!tensor.is_cpu()) throw hp::ArgumentError(std::string(name) + ": all tensors must be on one device, the CPU here");
  if (!tensor.is_contiguous()) {
    throw hp::ArgumentError(std::string(name) + ": a tensor isn't dense and row-major; call .contiguous() first");
  }
  hp::Array array{};
  array.name = name;
  array.dtype = dtype_of(tensor, name);
  array.address = reinterpret_cast<std::uintptr_t>(tensor.data_ptr());
  const auto sizes = tensor.sizes();
  array.shape.assign(sizes.begin(), sizes.end());
  return hp::checked(std::move(array), held_by(tensor, hp::size_of(array.dtype)));
}

std::vector<hp::Array> arrays_of(const Tensors& tensors, const char* name) {
  std::vector<hp::Array> arrays;
  arrays.reserve(tensors.size());
  for (const Tensor& tensor : tensors) arrays.push_back(array_of(tensor, name));
  return arrays;
}

// By the mark at its beginning the Python side knows the error for one of its own.
template <typename Function>
void marked(const Function& function) {
  try {
    function();
  } catch (const hp::ArgumentError& error) {
    throw std::runtime_error(std::string("hp_kernels: ") + error.what());
  }
}

void pack_into(Tensor flat, Tensors tensors, Integers offsets) {
  marked([&] { hp::pack::pack(array_of(flat, "flat"), offsets, arrays_of(tensors, "tensors")); });
}

void unpack_into(Tensors tensors, Tensor flat, Integers offsets) {
  marked([&] { hp::pack::unpack(arrays_of(tensors, "tensors"), array_of(flat, "flat"), offsets); });
}

void cast_into(Tensors targets, Tensors sources) {
  marked([&] { hp::pack::cast(arrays_of(targets, "targets"), arrays_of(sources, "sources")); });
}

void philox_fill(Tensor out, Text kind, Integers shape, Integers starts, Integers stops, std::int64_t seed,
                 std::int64_t offset, double p) {
  marked([&] {
    using hp::philox::Kind;
    if (kind != "uniform" && kind != "normal" && kind != "keep") {
      throw hp::ArgumentError("kind is one of uniform, normal, keep, not " + kind);
    }
    if (starts.size() != stops.size()) throw hp::ArgumentError("as many starts as stops are needed");
    hp::philox::Bounds box;
    for (std::size_t dim = 0; dim < starts.size(); ++dim) box.emplace_back(starts[dim], stops[dim]);
    hp::philox::fill(array_of(out, "out"), kind == "uniform" ? Kind::uniform : kind == "normal" ? Kind::normal : Kind::keep, shape,
                     box, static_cast<std::uint64_t>(seed), static_cast<std::uint64_t>(offset), p);
  });
}

}  // namespace

#ifdef HP_TORCH_STABLE
STABLE_TORCH_LIBRARY_IMPL(hp_kernels, CPU, library) {
  library.impl("pack_into", TORCH_BOX(&pack_into));
  library.impl("unpack_into", TORCH_BOX(&unpack_into));
  library.impl("cast_into", TORCH_BOX(&cast_into));
  library.impl("philox_fill", TORCH_BOX(&philox_fill));
}
#else
TORCH_LIBRARY_IMPL(hp_kernels, CPU, library) {
  library.impl("pack_into", [](const Tensor& flat, at::TensorList tensors, at::IntArrayRef offsets) {
    pack_into(flat, tensors.vec(), offsets.vec());
  });
  library.impl("unpack_into", [](at::TensorList tensors, const Tensor& flat, at::IntArrayRef offsets) {
    unpack_into(tensors.vec(), flat, offsets.vec());
  });
  library.impl("cast_into", [](at::TensorList targets, at::TensorList sources) { cast_into(targets.vec(), sources.vec()); });
  library.impl("philox_fill", [](const Tensor& out, std::string kind, at::IntArrayRef shape, at::IntArrayRef starts,
                                 at::IntArrayRef stops, std::int64_t seed, std::int64_t offset, double p) {
    philox_fill(out, std::move(kind), shape.vec(), starts.vec(), stops.vec(), seed, offset, p);
  });
}
#endif
