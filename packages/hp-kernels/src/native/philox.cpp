// Philox4x32-10 by global element index: the format of hp_core/random/philox.py, bit for bit.
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The arithmetic of normal numbers is
// that file's, in its order; nothing may be contracted to fused multiply-adds.
#include "philox.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "floats.h"
#include "instruction_sets.h"
#include "threads.h"

namespace hp::philox {
namespace {

// Elements worked on at a time: their words and numbers stay in the first-level cache.
constexpr int kLanes = 256;
// Elements that are worth a thread of their own.
constexpr std::int64_t kGrain = 1 << 14;

constexpr double kLn2 = 0x1.62e42fefa39efp-1;
// 2 atanh(s) = s (2 + 2/3 y + 2/5 y^2 + ...), y = s^2
constexpr double kAtanh[] = {
    0x1.0000000000000p+1, 0x1.5555555555555p-1, 0x1.999999999999ap-2, 0x1.2492492492492p-2, 0x1.c71c71c71c71cp-3,
    0x1.745d1745d1746p-3, 0x1.3b13b13b13b14p-3, 0x1.1111111111111p-3, 0x1.e1e1e1e1e1e1ep-4, 0x1.af286bca1af28p-4,
    0x1.8618618618618p-4, 0x1.642c8590b2164p-4, 0x1.47ae147ae147bp-4, 0x1.2f684bda12f68p-4, 0x1.1a7b9611a7b96p-4,
    0x1.0842108421084p-4, 0x1.f07c1f07c1f08p-5};
// sin(pi/2 t) = t (pi/2 - (pi/2)^3/3! y + ...), y = t^2
constexpr double kSine[] = {
    0x1.921fb54442d18p+0,   -0x1.4abbce625be52p-1,  0x1.466bc6775aae1p-4,   -0x1.32d2cce62bd84p-8,
    0x1.50783487ee77fp-13,  -0x1.e3074fde8871cp-19, 0x1.e8f434d018d5fp-25,  -0x1.6fadb9f155740p-31,
    0x1.aaec32af93355p-38,  -0x1.8a404211f9542p-45, 0x1.2877020d52cecp-52};

struct Stream {
  std::uint64_t seed;
  std::uint64_t offset;
};

struct alignas(64) Words {
  std::uint32_t w[4][kLanes];
};

HP_INLINE void ten_rounds(const std::uint64_t* index, const Stream& stream, Words& words) {
  const std::uint32_t offset_low = static_cast<std::uint32_t>(stream.offset);
  const std::uint32_t offset_high = static_cast<std::uint32_t>(stream.offset >> 32);
  const std::uint32_t seed_low = static_cast<std::uint32_t>(stream.seed);
  const std::uint32_t seed_high = static_cast<std::uint32_t>(stream.seed >> 32);
  for (int lane = 0; lane < kLanes; ++lane) {
    std::uint32_t w0 = static_cast<std::uint32_t>(index[lane]);
    std::uint32_t w1 = static_cast<std::uint32_t>(index[lane] >> 32);
    std::uint32_t w2 = offset_low, w3 = offset_high;
    std::uint32_t key0 = seed_low, key1 = seed_high;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const std::uint64_t first = static_cast<std::uint64_t>(w0) * 0xD2511F53u;
      const std::uint64_t second = static_cast<std::uint64_t>(w2) * 0xCD9E8D57u;
      w0 = static_cast<std::uint32_t>(second >> 32) ^ w1 ^ key0;
      w2 = static_cast<std::uint32_t>(first >> 32) ^ w3 ^ key1;
      w1 = static_cast<std::uint32_t>(second);
      w3 = static_cast<std::uint32_t>(first);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
    words.w[0][lane] = w0;
    words.w[1][lane] = w1;
    words.w[2][lane] = w2;
    words.w[3][lane] = w3;
  }
}

// An unsigned word as a double, exactly, by conversions that processors have for vectors.
HP_INLINE double of_word(std::uint32_t word) {
  return static_cast<double>(static_cast<std::int32_t>(word ^ 0x80000000u)) + 0x1p31;
}

// The top 53 bits of two words, exactly.
HP_INLINE double top_53(std::uint32_t first, std::uint32_t second) {
  return of_word(first) * 0x1p21 + static_cast<double>(static_cast<std::int32_t>(second >> 11));
}

template <int count>
HP_INLINE double polynomial(const double (&coefficients)[count], double y) {
  double result = coefficients[count - 1] * y + coefficients[count - 2];
#pragma GCC unroll 16
  for (int i = count - 3; i >= 0; --i) result = result * y + coefficients[i];
  return result;
}

// -ln(n / 2^53) for whole numbers 1 <= n <= 2^53.
HP_INLINE double minus_log(double n) {
  std::uint64_t bits;
  std::memcpy(&bits, &n, sizeof(bits));
  // n = m 2^(52 - e) with m in [1, 2); of 2^53 itself m is 2 and e is 0.
  const std::uint64_t mantissa = (bits & 0x000fffffffffffffu) | 0x3ff0000000000000u;
  const std::uint64_t exponent = ((1023u + 52u) - (bits >> 52)) & 0x7ffu;
  const std::uint64_t shifted = exponent | 0x4330000000000000u;
  double m, e;
  std::memcpy(&m, &mantissa, sizeof(m));
  std::memcpy(&e, &shifted, sizeof(e));
  e -= 0x1p52;
  const bool all = n >= 0x1p53;
  m = all ? 2.0 : m;
  e = all ? 0.0 : e;
  const double s = (2.0 - m) / (2.0 + m);
  return e * kLn2 + s * polynomial(kAtanh, s * s);
}

HP_INLINE void normal_block_body(const std::uint64_t* index, const Stream& stream, double* out) {
  Words words;
  ten_rounds(index, stream, words);
  for (int lane = 0; lane < kLanes; ++lane) {
    const double twice_log = 2.0 * minus_log(top_53(words.w[0][lane], words.w[1][lane]) + 1.0);
    const double t = std::fabs(top_53(words.w[2][lane], words.w[3][lane]) - 0x1p52) * 0x1p-51 - 1.0;
    out[lane] = std::sqrt(twice_log) * (t * polynomial(kSine, t * t));
  }
}

HP_INLINE void uniform_block_53_body(const std::uint64_t* index, const Stream& stream, double* out) {
  Words words;
  ten_rounds(index, stream, words);
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = top_53(words.w[0][lane], words.w[1][lane]) * 0x1p-53;
}

// The top `bits` <= 24 bits of the first word.
HP_INLINE void uniform_block_body(const std::uint64_t* index, const Stream& stream, int bits, float* out) {
  Words words;
  ten_rounds(index, stream, words);
  const float scale = 1.0f / static_cast<float>(1 << bits);
  for (int lane = 0; lane < kLanes; ++lane) {
    out[lane] = static_cast<float>(static_cast<std::int32_t>(words.w[0][lane] >> (32 - bits))) * scale;
  }
}

HP_INLINE void half_block_body(const float* in, Half* out) {
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = to_half(in[lane]);
}

HP_INLINE void bfloat_block_body(const float* in, BFloat16* out) {
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = to_bfloat(in[lane]);
}

HP_INLINE void float_block_body(const double* in, float* out) {
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = static_cast<float>(in[lane]);
}

HP_INLINE void keep_block_body(const float* in, float least, std::uint8_t* out) {
  for (int lane = 0; lane < kLanes; ++lane) out[lane] = in[lane] >= least ? 1 : 0;
}

HP_VARIANTS(void, normal_block, (const std::uint64_t* index, const Stream& stream, double* out), (index, stream, out),
            normal_block_body(index, stream, out))
HP_VARIANTS(void, uniform_block_53, (const std::uint64_t* index, const Stream& stream, double* out), (index, stream, out),
            uniform_block_53_body(index, stream, out))
HP_VARIANTS(void, uniform_block, (const std::uint64_t* index, const Stream& stream, int bits, float* out), (index, stream, bits, out),
            uniform_block_body(index, stream, bits, out))
HP_VARIANTS(void, half_block, (const float* in, Half* out), (in, out), half_block_body(in, out))
HP_VARIANTS(void, bfloat_block, (const float* in, BFloat16* out), (in, out), bfloat_block_body(in, out))
HP_VARIANTS(void, float_block, (const double* in, float* out), (in, out), float_block_body(in, out))
HP_VARIANTS(void, keep_block, (const float* in, float least, std::uint8_t* out), (in, least, out),
            keep_block_body(in, least, out))

// A box of a global tensor, its trailing dims that are held whole merged into one.
struct Box {
  std::vector<std::int64_t> start, size, stride;

  // Global indices of up to `count` elements from the local one `first` on; the rest of the lanes repeat the last.
  void indices(std::int64_t first, int count, std::uint64_t* out) const {
    const std::size_t ndim = size.size();
    std::array<std::int64_t, 64> place{};
    std::int64_t rest = first;
    std::uint64_t base = 0;
    for (std::size_t dim = ndim; dim-- > 0;) {
      place[dim] = rest % size[dim];
      rest /= size[dim];
      base += static_cast<std::uint64_t>(start[dim] + place[dim]) * static_cast<std::uint64_t>(stride[dim]);
    }
    const std::size_t last = ndim - 1;
    int done = 0;
    while (true) {
      const int run = static_cast<int>(std::min<std::int64_t>(size[last] - place[last], count - done));
      for (int lane = 0; lane < run; ++lane) out[done + lane] = base + static_cast<std::uint64_t>(lane);
      done += run;
      if (done >= count) break;
      base -= static_cast<std::uint64_t>(place[last]);  // back to the row's first element, then on to the next row
      place[last] = 0;
      for (std::size_t dim = last; dim-- > 0;) {
        base += static_cast<std::uint64_t>(stride[dim]);
        if (++place[dim] < size[dim]) break;
        base -= static_cast<std::uint64_t>(size[dim]) * static_cast<std::uint64_t>(stride[dim]);
        place[dim] = 0;
      }
    }
    std::fill(out + done, out + kLanes, out[done - 1]);
  }
};

// Checks a box against the global shape, and gives it with as few dims as it can have (at least one).
Box box_of(const std::vector<std::int64_t>& shape, const Bounds& bounds) {
  if (shape.size() != bounds.size()) {
    throw ArgumentError("box: " + std::to_string(bounds.size()) + " intervals for a tensor of the shape " + text_of(shape));
  }
  if (shape.size() > 64) throw ArgumentError("global_shape: at most 64 dims");
  Box box;
  std::int64_t stride = 1;
  bool whole = false;  // whether the dim that was added last is held whole, so that the next one out goes on in memory
  for (std::size_t dim = shape.size(); dim-- > 0;) {
    const auto [low, high] = bounds[dim];
    if (low < 0 || high < low || high > shape[dim]) {
      throw ArgumentError("box: [" + std::to_string(low) + ", " + std::to_string(high) + ") is no part of dim " +
                          std::to_string(dim) + " of the shape " + text_of(shape));
    }
    if (whole) {
      const std::int64_t inner = box.size.back();
      box.start.back() = checked_product(low, inner, "box");
      box.size.back() = checked_product(high - low, inner, "box");
    } else {
      box.start.push_back(low);
      box.size.push_back(high - low);
      box.stride.push_back(stride);
    }
    whole = low == 0 && high == shape[dim];
    stride = checked_product(stride, shape[dim], "global_shape");
  }
  if (box.size.empty()) {
    box.start = {0};
    box.size = {1};
    box.stride = {1};
  }
  std::reverse(box.start.begin(), box.start.end());
  std::reverse(box.size.begin(), box.size.end());
  std::reverse(box.stride.begin(), box.stride.end());
  return box;
}

template <typename T>
void store(T* out, const T* block, int count) {
  std::memcpy(out, block, static_cast<std::size_t>(count) * sizeof(T));
}

void fill_range(const Array& out, const Box& box, Kind kind, const Stream& stream, float least, std::int64_t begin,
                std::int64_t end) {
  alignas(64) std::uint64_t index[kLanes];
  alignas(64) double wide[kLanes];
  alignas(64) float single[kLanes];
  for (std::int64_t first = begin; first < end; first += kLanes) {
    const int count = static_cast<int>(std::min<std::int64_t>(kLanes, end - first));
    box.indices(first, count, index);
    if (kind == Kind::normal) {
      normal_block(index, stream, wide);
    } else if (out.dtype == DType::float64) {
      uniform_block_53(index, stream, wide);
    } else {
      const int bits = out.dtype == DType::float16 ? 11 : out.dtype == DType::bfloat16 ? 8 : 24;
      uniform_block(index, stream, bits, single);
    }
    if (out.dtype == DType::float64) {
      store(out.data<double>() + first, wide, count);
      continue;
    }
    // The format rounds to float32 first, then to the shorter types.
    if (kind == Kind::normal) float_block(wide, single);
    if (out.dtype == DType::float32) {
      store(out.data<float>() + first, single, count);
    } else if (out.dtype == DType::float16) {
      Half block[kLanes];
      half_block(single, block);
      store(out.data<Half>() + first, block, count);
    } else if (out.dtype == DType::bfloat16) {
      BFloat16 block[kLanes];
      bfloat_block(single, block);
      store(out.data<BFloat16>() + first, block, count);
    } else {
      std::uint8_t block[kLanes];
      keep_block(single, least, block);
      store(out.data<std::uint8_t>() + first, block, count);
    }
  }
}

}  // namespace

void fill(const Array& out, Kind kind, const std::vector<std::int64_t>& shape, const Bounds& bounds, std::uint64_t seed,
          std::uint64_t offset, double probability) {
  if (kind == Kind::keep) {
    require_dtype(out, {DType::uint8});
    if (!(probability >= 0.0 && probability <= 1.0)) {
      throw ArgumentError("p: " + std::to_string(probability) + " is not a probability");
    }
  } else {
    require_dtype(out, {DType::float32, DType::float64, DType::float16, DType::bfloat16});
  }
  for (const std::int64_t size : shape) {
    if (size < 0) throw ArgumentError("global_shape: " + text_of(shape) + " has a negative size");
  }
  const Box box = box_of(shape, bounds);
  std::int64_t numel = 1;
  for (const std::int64_t size : box.size) numel = checked_product(numel, size, "box");
  if (numel != out.numel) {
    throw ArgumentError("out: has " + std::to_string(out.numel) + " elements, the box " + std::to_string(numel));
  }
  if (numel == 0) return;
  const float least = static_cast<float>(probability);
  parallel_for(
      numel, kGrain,
      [&](std::int64_t begin, std::int64_t end) { fill_range(out, box, kind, {seed, offset}, least, begin, end); }, kLanes);
}

}  // namespace hp::philox
