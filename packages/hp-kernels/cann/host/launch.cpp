// The entry points in front of an NPU. Built with CANN only; it has not run on hardware.
#include "acl/acl.h"
#include "aclrtlaunch_hp_lse_merge_bfloat16.h"
#include "aclrtlaunch_hp_lse_merge_float16.h"
#include "aclrtlaunch_hp_lse_merge_float32.h"
#include "aclrtlaunch_hp_moe_combine_bfloat16.h"
#include "aclrtlaunch_hp_moe_combine_float16.h"
#include "aclrtlaunch_hp_moe_combine_float32.h"
#include "aclrtlaunch_hp_moe_dispatch_16.h"
#include "aclrtlaunch_hp_moe_dispatch_32.h"
#include "tiling/platform/platform_ascendc.h"

namespace {

std::uint32_t device_cores() { return platform_ascendc::PlatformAscendCManager::GetInstance()->GetCoreNumAiv(); }

std::uint64_t device_unified_bytes() {
  std::uint64_t bytes = 0;
  platform_ascendc::PlatformAscendCManager::GetInstance()->GetCoreMemSize(platform_ascendc::CoreMemType::UB, bytes);
  return bytes;
}

}  // namespace

#define HP_LAUNCH(kernel, cores, stream, tiling, ...) \
  (ACLRT_LAUNCH_KERNEL(kernel)(cores, stream, __VA_ARGS__, &(tiling)) == ACL_SUCCESS ? kLaunched : kLaunchFailed)

#include "entry.h"
