// Many tensors into one flat buffer and back, in one call, converting the element type on the way: to nearest even, NaN to NaN.
#include "pack.h"

#include <algorithm>
#include <cstring>

#include "floats.h"
#include "instruction_sets.h"
#include "threads.h"

namespace hp::pack {
namespace {

// Elements that are worth a thread of their own, and at whose multiples the work is cut.
constexpr std::int64_t kGrain = 1 << 16;

// A run of elements to be copied from one place to another.
struct Piece {
  std::uintptr_t target, source;
  std::int64_t numel;
  DType to, from;
};

template <typename To, typename From>
HP_INLINE void convert_body(To* out, const From* in, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) narrow(widen(in[i]), out[i]);
}

// One loop for each pair of types.
#define HP_CONVERT(TO, FROM)                                                                                        \
  HP_VARIANTS(void, convert_##TO##_##FROM, (TO* out, const FROM* in, std::int64_t count), (out, in, count),         \
              convert_body(out, in, count))
#define HP_CONVERT_FROM_ALL(TO) \
  HP_CONVERT(TO, float)         \
  HP_CONVERT(TO, double)        \
  HP_CONVERT(TO, Half)        \
  HP_CONVERT(TO, BFloat16)
HP_CONVERT_FROM_ALL(float)
HP_CONVERT_FROM_ALL(double)
HP_CONVERT_FROM_ALL(Half)
HP_CONVERT_FROM_ALL(BFloat16)
#undef HP_CONVERT_FROM_ALL
#undef HP_CONVERT

using Convert = void (*)(std::uintptr_t, std::uintptr_t, std::int64_t);

#define HP_ENTRY(TO, FROM)                                                                          \
  [](std::uintptr_t target, std::uintptr_t source, std::int64_t count) {                            \
    convert_##TO##_##FROM(reinterpret_cast<TO*>(target), reinterpret_cast<const FROM*>(source), count); \
  }
#define HP_ROW(TO) {HP_ENTRY(TO, float), HP_ENTRY(TO, double), HP_ENTRY(TO, Half), HP_ENTRY(TO, BFloat16)}
// By the codes of the types; those of integers have none.
constexpr Convert kConversions[4][4] = {HP_ROW(float), HP_ROW(double), HP_ROW(Half), HP_ROW(BFloat16)};
#undef HP_ROW
#undef HP_ENTRY

bool is_floating(DType dtype) { return static_cast<int>(dtype) < 4; }

void copy_part(const Piece& piece, std::int64_t begin, std::int64_t end) {
  const std::uintptr_t target = piece.target + static_cast<std::uintptr_t>(begin * size_of(piece.to));
  const std::uintptr_t source = piece.source + static_cast<std::uintptr_t>(begin * size_of(piece.from));
  if (piece.to == piece.from) {
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source),
                static_cast<std::size_t>((end - begin) * size_of(piece.to)));
  } else {
    kConversions[static_cast<int>(piece.to)][static_cast<int>(piece.from)](target, source, end - begin);
  }
}

void require_convertible(const Array& to, const Array& from) {
  if (to.dtype != from.dtype && !(is_floating(to.dtype) && is_floating(from.dtype))) {
    throw ArgumentError(std::string(from.name) + ": " + name_of(from.dtype) + " isn't converted to the " + name_of(to.dtype) +
                        " of " + to.name + "; only floating-point types are");
  }
}

// The flat array's interval of each array, checked to lie inside of it.
std::vector<Piece> pieces_of(const Array& flat, const std::vector<std::int64_t>& offsets, const std::vector<Array>& arrays,
                             bool packing) {
  require_ndim(flat, 1);
  if (offsets.size() != arrays.size()) {
    throw ArgumentError("offsets: " + std::to_string(offsets.size()) + " for " + std::to_string(arrays.size()) + " tensors");
  }
  std::vector<Piece> pieces;
  pieces.reserve(arrays.size());
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const Array& array = arrays[i];
    packing ? require_convertible(flat, array) : require_convertible(array, flat);
    const std::int64_t end = checked_sum(offsets[i], array.numel, "offsets");
    if (offsets[i] < 0 || end > flat.numel) {
      throw ArgumentError("offsets: tensor " + std::to_string(i) + " would lie at [" + std::to_string(offsets[i]) + ", " +
                          std::to_string(end) + ") of the " + std::to_string(flat.numel) + " elements of the flat tensor");
    }
    if (array.numel == 0) continue;
    const std::uintptr_t place = flat.address + static_cast<std::uintptr_t>(offsets[i] * size_of(flat.dtype));
    pieces.push_back(packing ? Piece{place, array.address, array.numel, flat.dtype, array.dtype}
                             : Piece{array.address, place, array.numel, array.dtype, flat.dtype});
  }
  return pieces;
}

// What is written may not be written twice, or threads would race for the result.
void require_apart(const std::vector<Piece>& pieces, const char* what) {
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> spans;
  spans.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    spans.emplace_back(piece.target, piece.target + static_cast<std::uintptr_t>(piece.numel * size_of(piece.to)));
  }
  std::sort(spans.begin(), spans.end());
  for (std::size_t i = 1; i < spans.size(); ++i) {
    if (spans[i].first < spans[i - 1].second) {
      throw ArgumentError(std::string(what) + " share memory with each other; what is written must be apart");
    }
  }
}

void copy_all(const std::vector<Piece>& pieces) {
  std::vector<std::int64_t> starts;
  starts.reserve(pieces.size() + 1);
  std::int64_t total = 0;
  for (const Piece& piece : pieces) {
    starts.push_back(total);
    total = checked_sum(total, piece.numel, "tensors");
  }
  parallel_for(
      total, kGrain,
      [&](std::int64_t begin, std::int64_t end) {
        auto i = static_cast<std::size_t>(std::upper_bound(starts.begin(), starts.end(), begin) - starts.begin()) - 1;
        for (; i < pieces.size() && starts[i] < end; ++i) {
          copy_part(pieces[i], std::max(begin - starts[i], std::int64_t{0}), std::min(end - starts[i], pieces[i].numel));
        }
      },
      64);
}

}  // namespace

void pack(const Array& flat, const std::vector<std::int64_t>& offsets, const std::vector<Array>& tensors) {
  const std::vector<Piece> pieces = pieces_of(flat, offsets, tensors, true);
  for (const Array& tensor : tensors) require_disjoint(flat, tensor);
  require_apart(pieces, "the tensors' places in flat");
  copy_all(pieces);
}

void unpack(const std::vector<Array>& tensors, const Array& flat, const std::vector<std::int64_t>& offsets) {
  const std::vector<Piece> pieces = pieces_of(flat, offsets, tensors, false);
  for (const Array& tensor : tensors) require_disjoint(tensor, flat);
  require_apart(pieces, "tensors");
  copy_all(pieces);
}

void cast(const std::vector<Array>& to, const std::vector<Array>& from) {
  if (to.size() != from.size()) {
    throw ArgumentError("targets: " + std::to_string(to.size()) + " for " + std::to_string(from.size()) + " sources");
  }
  std::vector<Piece> pieces;
  pieces.reserve(to.size());
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> read;
  for (std::size_t i = 0; i < to.size(); ++i) {
    require_convertible(to[i], from[i]);
    require_shape(to[i], from[i].shape);
    if (to[i].numel == 0) continue;
    pieces.push_back({to[i].address, from[i].address, to[i].numel, to[i].dtype, from[i].dtype});
    read.emplace_back(from[i].address, from[i].address + static_cast<std::uintptr_t>(from[i].bytes));
  }
  require_apart(pieces, "targets");
  // Sources may share memory with each other; none with a target. Targets are apart, so for each the sources that begin
  // before its end are looked at from the one that reaches furthest.
  std::sort(read.begin(), read.end());
  std::vector<std::uintptr_t> reach(read.size());
  for (std::size_t i = 0; i < read.size(); ++i) reach[i] = i == 0 ? read[i].second : std::max(reach[i - 1], read[i].second);
  for (const Piece& piece : pieces) {
    const std::uintptr_t end = piece.target + static_cast<std::uintptr_t>(piece.numel * size_of(piece.to));
    const auto before = std::lower_bound(read.begin(), read.end(), std::pair<std::uintptr_t, std::uintptr_t>(end, 0));
    if (before != read.begin() && reach[static_cast<std::size_t>(before - read.begin()) - 1] > piece.target) {
      throw ArgumentError("targets and sources share memory; give the targets memory of their own");
    }
  }
  copy_all(pieces);
}

}  // namespace hp::pack
