// Packing as a MindSpore op for the CPU, built by ops.CustomOpBuilder in the environment that uses it: MindSpore allocates the
// result and launches the kernel in its own pipeline, with no copy to NumPy in between.
#include <algorithm>
#include <string>
#include <vector>

#include "ms_extension/api.h"

#include "../arrays.h"
#include "../pack.h"

namespace {

struct Type {
  mindspore::TypeId id;
  hp::DType dtype;
};
constexpr Type kTypes[] = {{mindspore::kNumberTypeFloat32, hp::DType::float32},
                           {mindspore::kNumberTypeFloat64, hp::DType::float64},
                           {mindspore::kNumberTypeFloat16, hp::DType::float16},
                           {mindspore::kNumberTypeBFloat16, hp::DType::bfloat16}};

hp::DType dtype_of(const ms::Tensor& tensor) {
  for (const Type& type : kTypes) {
    if (type.id == tensor.data_type()) return type.dtype;
  }
  throw hp::ArgumentError("pack: only floating-point tensors are packed");
}

mindspore::TypeId type_of(std::int64_t code) {
  for (const Type& type : kTypes) {
    if (static_cast<std::int64_t>(type.dtype) == code) return type.id;
  }
  throw hp::ArgumentError("pack: no floating-point type has the code " + std::to_string(code));
}

hp::Array array_of(const ms::Tensor& tensor, const char* name) {
  hp::Array array{};
  array.name = name;
  array.dtype = dtype_of(tensor);
  array.address = reinterpret_cast<std::uintptr_t>(tensor.GetDataPtr());
  array.shape = {static_cast<std::int64_t>(tensor.numel())};
  // MindSpore has allocated what it launches kernels with.
  return hp::checked(std::move(array), static_cast<std::int64_t>(tensor.numel()) * hp::size_of(dtype_of(tensor)));
}

class Pack : public ms::pynative::PyboostRunner {
 public:
  using PyboostRunner::PyboostRunner;
  void LaunchKernel() override {
    std::vector<hp::Array> arrays;
    std::vector<std::int64_t> offsets;
    std::int64_t end = 0;
    for (const ms::Tensor& tensor : inputs()) {
      offsets.push_back(end);
      arrays.push_back(array_of(tensor, "tensors"));
      end += arrays.back().numel;
    }
    hp::pack::pack(array_of(outputs()[0], "flat"), offsets, arrays);
  }
};

ms::Tensor pack(const std::vector<ms::Tensor>& tensors, std::int64_t code) {
  std::int64_t numel = 0;
  std::vector<ms::Tensor> dense;
  for (const ms::Tensor& tensor : tensors) {
    numel += static_cast<std::int64_t>(tensor.numel());
    dense.push_back(tensor.is_contiguous() ? tensor : tensor.contiguous());
  }
  auto flat = ms::Tensor(type_of(code), {numel});
  auto runner = std::make_shared<Pack>("HpKernelsPack");
  runner->Run(dense, {flat});
  return flat;
}

py::object pack_op(const std::vector<ms::Tensor>& tensors, std::int64_t code) {
  type_of(code);  // here, because what is thrown in the pipeline is told only when somebody waits for it
  return ms::pynative::PyboostRunner::Call<1>(std::string("HpKernelsPack"), pack, tensors, code);
}

}  // namespace

PYBIND11_MODULE(MS_EXTENSION_NAME, module) {
  module.def("pack", &pack_op, pybind11::arg("tensors"), pybind11::arg("dtype"),
             "Lay floating-point tensors end to end in a new flat one of the element type with this code.");
}
