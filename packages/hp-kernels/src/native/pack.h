// Many tensors into one flat buffer and back, in one call, converting the element type on the way.
#pragma once

#include <cstdint>
#include <vector>

#include "arrays.h"

namespace hp::pack {

// Copies each tensor to its offset, in elements, of `flat`, which has one dim. Places may not overlap, nor share memory with a tensor.
void pack(const Array& flat, const std::vector<std::int64_t>& offsets, const std::vector<Array>& tensors);

// Copies parts of `flat` to tensors, which may share no memory with each other or with it.
void unpack(const std::vector<Array>& tensors, const Array& flat, const std::vector<std::int64_t>& offsets);

// Copies arrays to others of the same shapes; those that are written to may share no memory with any other.
void cast(const std::vector<Array>& to, const std::vector<Array>& from);

}  // namespace hp::pack
