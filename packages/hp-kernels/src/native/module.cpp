// The extension module: each kernel's file registers its own functions. Links no framework.
#include <pybind11/pybind11.h>

#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "instruction_sets.h"
#include "threads.h"

namespace py = pybind11;

void register_philox(py::module_& module);
void register_pack(py::module_& module);
void register_lse_merge(py::module_& module);
void register_permute(py::module_& module);
void register_tiling(py::module_& module);

namespace {

const char* compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#elif defined(__GNUC__)
  return "gcc " __VERSION__;
#else
  return "unknown";
#endif
}

constexpr std::pair<const char*, hp::InstructionSet> kInstructionSets[] = {
#if defined(__x86_64__)
    {"sse2", hp::InstructionSet::baseline}, {"avx2", hp::InstructionSet::avx2}, {"avx512", hp::InstructionSet::avx512}};
#elif defined(__aarch64__)
    {"neon", hp::InstructionSet::baseline}};
#else
    {"portable", hp::InstructionSet::baseline}};
#endif

// The instruction sets that loops can use here, from the least to the best.
std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto& [name, set] : kInstructionSets) {
    if (set <= hp::best_instruction_set()) names.emplace_back(name);
  }
  return names;
}

void set_instruction_set(const std::string& wanted) {
  for (const auto& [name, set] : kInstructionSets) {
    if (wanted == name && set <= hp::best_instruction_set()) {
      hp::instruction_set = set;
      return;
    }
  }
  throw hp::ArgumentError("instruction_set: this processor, or this build, has no " + wanted);
}

// The class of the Python side; kept for ever, as the translator may run while the interpreter ends.
PyObject* argument_error = nullptr;

}  // namespace

// Threads, forks and what a kernel owns are minded; the GIL is released by the kernels themselves.
PYBIND11_MODULE(_native, module) {
  module.doc() = "The native kernels of hp_kernels; the package's Python modules are their face.";
  argument_error = py::module_::import("hp_kernels.errors").attr("KernelArgumentError").cast<py::object>().release().ptr();
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const hp::ArgumentError& error) {
      PyErr_SetString(argument_error, error.what());
    }
  });

  py::dict build;
  build["compiler"] = compiler();
  build["flags"] = HP_FLAGS;
  build["standard"] = static_cast<long>(__cplusplus);
  build["pybind11"] = HP_PYBIND;
  build["processor"] = instruction_sets().back();
  module.attr("build") = build;

  module.def("thread_count", &hp::thread_count, "How many threads a kernel uses at most.");
  module.def("set_thread_count", &hp::set_thread_count, py::arg("count"), "Set it; 0 asks the environment again.");

  module.def("instruction_sets", &instruction_sets, "Those that loops can use here, from the least to the best, which they do.");
  module.def("set_instruction_set", &set_instruction_set, py::arg("name"),
             "Have the loops use another, for all threads; the results are the same.");

  register_philox(module);
  register_pack(module);
  register_lse_merge(module);
  register_permute(module);
  register_tiling(module);
}
