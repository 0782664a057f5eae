// Random numbers by global element index: the format of hp_core/random/philox.py, bit for bit.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "arrays.h"

namespace hp::philox {

// Uniform in [0, 1); standard normal; 1 where the uniform float32 number is at least the probability, else 0, as uint8.
enum class Kind { uniform, normal, keep };

// Of each dim, the half-open interval that is wanted.
using Bounds = std::vector<std::pair<std::int64_t, std::int64_t>>;

// Fills `out`, row-major, with a box of a global tensor of this shape.
void fill(const Array& out, Kind kind, const std::vector<std::int64_t>& shape, const Bounds& bounds, std::uint64_t seed,
          std::uint64_t offset, double probability);

}  // namespace hp::philox
