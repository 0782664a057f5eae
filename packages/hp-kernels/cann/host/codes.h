// The numbers that cross between the host code of the CANN kernels and Python.
#pragma once

namespace hp_cann {

// Codes of element types, as hp_kernels/dtypes.py has them.
enum ElementType : int { kFloat32 = 0, kFloat16 = 2, kBfloat16 = 3 };

// What an entry point returns.
enum Status : int { kLaunched = 0, kUnknownType = 1, kCannotTile = 2, kLaunchFailed = 3 };

}  // namespace hp_cann
