// The kernels and their host code on a CPU: one core after the other, with the shim's checks. For the tests.
#include "kernel_operator.h"

#include "../kernels/lse_merge.cpp"
#include "../kernels/permute.cpp"
#include "../host/codes.h"

namespace {

std::uint32_t cores_of_device = 40;
std::uint64_t bytes_of_device = 192 * 1024;
std::string last_fault;

std::uint32_t device_cores() { return cores_of_device; }
std::uint64_t device_unified_bytes() { return bytes_of_device; }

std::uint8_t* watched = nullptr;
std::uint64_t watched_bytes = 0;

// Runs a kernel for every core, last one first, for no core may need another's results.
template <typename Tiling, typename Kernel>
int run(std::uint32_t cores, const Tiling& tiling, Kernel&& kernel) {
  AscendC::Core& core = AscendC::core();
  std::vector<std::uint8_t> written(watched_bytes);
  try {
    for (std::int64_t index = static_cast<std::int64_t>(cores) - 1; index >= 0; --index) {
      core = AscendC::Core{};
      core.index = index;
      core.count = cores;
      core.unified_bytes = bytes_of_device;
      core.written_base = watched;
      core.written = std::move(written);
      kernel();
      written = std::move(core.written);
      AscendC::require(core.used_bytes == tiling.unified_bytes, "the kernel takes " + std::to_string(core.used_bytes) +
                                                                    " bytes of the unified buffer, its tiling says " +
                                                                    std::to_string(tiling.unified_bytes));
    }
    for (const std::uint8_t times : written) {
      AscendC::require(times == 1, "a byte of the result was written " + std::to_string(times) + " times");
    }
  } catch (const std::exception& fault) {
    last_fault = fault.what();
    return hp_cann::kLaunchFailed;
  }
  return hp_cann::kLaunched;
}

std::uint8_t* bytes(void* pointer) { return static_cast<std::uint8_t*>(pointer); }

template <typename Kernel, typename Tiling, typename... Arguments>
int launch(Kernel kernel, std::uint32_t cores, const Tiling& tiling, Arguments... arguments) {
  return run(cores, tiling, [&] { kernel(bytes(arguments)..., tiling); });
}

}  // namespace

#define HP_LAUNCH(kernel, cores, stream, tiling, ...) ((void)(stream), launch(kernel, cores, tiling, __VA_ARGS__))

#include "../host/entry.h"

// The made-up device, and the bytes of a result of which each must be written once (null: nothing is watched).
HP_EXPORT void hp_shim_device(std::uint32_t cores, std::uint64_t unified_bytes, void* result, std::uint64_t result_bytes) {
  cores_of_device = cores;
  bytes_of_device = unified_bytes;
  watched = static_cast<std::uint8_t*>(result);
  watched_bytes = result == nullptr ? 0 : result_bytes;
}

HP_EXPORT const char* hp_shim_fault() { return last_fault.c_str(); }
