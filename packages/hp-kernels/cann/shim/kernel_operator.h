// The calls of Ascend C that the kernels use, for a CPU: so that their bodies compile and run where no CANN is.
//
// It computes, and it is strict: what an NPU answers with wrong numbers or an exception of the core is a Fault here. Addresses
// must be aligned to 32 bytes; transfers and vector instructions stay inside their tensors and limits; the unified buffer has a
// size; tensors go through their queues in order; the scalar unit reads only what it has waited for; new memory holds NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../src/native/floats.h"

#define __gm__
#define __aicore__
#define __global__
#define GM_ADDR std::uint8_t*

struct half : hp::Half {
  half() = default;
  explicit half(int value) { hp::narrow(static_cast<float>(value), static_cast<hp::Half&>(*this)); }
};
struct bfloat16_t : hp::BFloat16 {
  bfloat16_t() = default;
  explicit bfloat16_t(int value) { hp::narrow(static_cast<float>(value), static_cast<hp::BFloat16&>(*this)); }
};

namespace AscendC {

class Fault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline void require(bool kept, const std::string& rule) {
  if (!kept) throw Fault(rule);
}

constexpr std::uint64_t kAlignment = 32;

enum class TPosition { GM, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;
enum class RoundMode { CAST_NONE, CAST_RINT };
enum class HardEvent { V_S, MTE2_S };
using event_t = int;

// One core, while a kernel runs on it.
struct Core {
  std::int64_t index = 0, count = 1;
  std::uint64_t unified_bytes = 0, used_bytes = 0;
  // Time, counted in instructions: a scalar read must come after a wait for what wrote the memory.
  std::uint64_t now = 0;
  std::uint64_t flagged[2] = {}, waited[2] = {};
  bool flag_set[2] = {};
  // Bytes of global memory that the kernel may write, and how often each was written.
  std::uint8_t* written_base = nullptr;
  std::vector<std::uint8_t> written;
};

inline Core& core() {
  static thread_local Core the_core;
  return the_core;
}

inline std::int64_t GetBlockIdx() { return core().index; }
inline std::int64_t GetBlockNum() { return core().count; }

template <HardEvent event>
void SetFlag(event_t) {
  constexpr int unit = static_cast<int>(event);
  require(!core().flag_set[unit], "SetFlag: the flag is set already");
  core().flag_set[unit] = true;
  core().flagged[unit] = core().now;
}

template <HardEvent event>
void WaitFlag(event_t) {
  constexpr int unit = static_cast<int>(event);
  require(core().flag_set[unit], "WaitFlag: nobody sets this flag, the core would hang");
  core().flag_set[unit] = false;
  core().waited[unit] = core().flagged[unit];
}

// A piece of the unified buffer.
struct Storage {
  enum class State { calculation, unused, filling, queued, taken };

  Storage(std::uint64_t bytes_, TPosition filled_by_, State state_) : bytes(bytes_), filled_by(filled_by_), state(state_) {
    memory.reset(static_cast<std::uint8_t*>(std::aligned_alloc(kAlignment, bytes + kAlignment)));
    poison();
  }
  void poison() { std::memset(memory.get(), 0xff, bytes); }

  struct Release {
    void operator()(std::uint8_t* memory) const { std::free(memory); }
  };
  std::uint64_t bytes;
  TPosition filled_by;
  State state;
  std::uint64_t vector_wrote = 0, transfer_wrote = 0;
  std::unique_ptr<std::uint8_t, Release> memory;
};

template <typename T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* start, std::uint64_t size) {
    data_ = start;
    size_ = size;
  }
  GlobalTensor operator[](std::uint64_t offset) const {
    require(offset <= size_, "GlobalTensor: offset " + std::to_string(offset) + " of " + std::to_string(size_));
    GlobalTensor part;
    part.SetGlobalBuffer(data_ + offset, size_ - offset);
    return part;
  }
  T* data() const { return data_; }
  std::uint64_t size() const { return size_; }

 private:
  T* data_ = nullptr;
  std::uint64_t size_ = 0;
};

template <typename T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(Storage* storage, std::uint64_t offset) : storage_(storage), offset_(offset) {}
  LocalTensor operator[](std::uint64_t elements) const {
    require(offset_ + elements * sizeof(T) <= storage_->bytes, "LocalTensor: an offset beyond its buffer");
    return LocalTensor(storage_, offset_ + elements * sizeof(T));
  }
  T GetValue(std::uint64_t index) const {
    require(storage_ != nullptr && offset_ + (index + 1) * sizeof(T) <= storage_->bytes, "GetValue: beyond the buffer");
    require(storage_->state == Storage::State::calculation || storage_->state == Storage::State::taken, "GetValue: the tensor is not dequeued");
    require(storage_->vector_wrote <= core().waited[static_cast<int>(HardEvent::V_S)], "GetValue: no wait for the vector unit (V_S)");
    require(storage_->transfer_wrote <= core().waited[static_cast<int>(HardEvent::MTE2_S)], "GetValue: no wait for the transfer (MTE2_S)");
    return data()[index];
  }
  T* data() const { return reinterpret_cast<T*>(storage_->memory.get() + offset_); }
  Storage* storage() const { return storage_; }
  std::uint64_t offset() const { return offset_; }
  std::uint64_t bytes_left() const { return storage_->bytes - offset_; }

 private:
  Storage* storage_ = nullptr;
  std::uint64_t offset_ = 0;
};

template <TPosition position>
class TBuf {
 public:
  template <typename T>
  LocalTensor<T> Get() {
    require(storage != nullptr, "TBuf: not initialised");
    return LocalTensor<T>(storage.get(), 0);
  }
  std::unique_ptr<Storage> storage;
};

template <TPosition source, TPosition destination, int depth>
class TQueBind {
 public:
  template <typename T>
  LocalTensor<T> AllocTensor() {
    for (auto& storage : storages) {
      if (storage->state == Storage::State::unused) {
        storage->state = Storage::State::filling;
        storage->poison();
        return LocalTensor<T>(storage.get(), 0);
      }
    }
    throw Fault("AllocTensor: all buffers of the queue are in use, the core would hang");
  }
  template <typename T>
  void EnQue(LocalTensor<T>& tensor) {
    require(tensor.storage()->state == Storage::State::filling, "EnQue: not a tensor that AllocTensor gave");
    tensor.storage()->state = Storage::State::queued;
    queued.push_back(tensor.storage());
  }
  template <typename T>
  LocalTensor<T> DeQue() {
    require(!queued.empty(), "DeQue: the queue is empty, the core would hang");
    Storage* storage = queued.front();
    queued.pop_front();
    storage->state = Storage::State::taken;
    return LocalTensor<T>(storage, 0);
  }
  template <typename T>
  void FreeTensor(LocalTensor<T>& tensor) {
    require(tensor.storage()->state == Storage::State::taken, "FreeTensor: not a tensor that DeQue gave");
    tensor.storage()->state = Storage::State::unused;
  }
  ~TQueBind() noexcept(false) {
    // What is still in use when a kernel ends was never freed, and the next tile would have waited for it for ever.
    for (auto& storage : storages) {
      if (std::uncaught_exceptions() == 0) require(storage->state == Storage::State::unused, "a tensor of a queue was not freed");
    }
  }
  static constexpr TPosition kSource = source;
  std::vector<std::unique_ptr<Storage>> storages;
  std::deque<Storage*> queued;
};

template <TPosition position, int depth>
class TQue : public TQueBind<position, position, depth> {};

class TPipe {
 public:
  template <TPosition source, TPosition destination, int depth>
  void InitBuffer(TQueBind<source, destination, depth>& queue, int count, std::uint64_t bytes) {
    require(count <= depth || depth == 1, "InitBuffer: more buffers than the queue is deep");
    for (int index = 0; index < count; ++index) {
      queue.storages.push_back(std::make_unique<Storage>(take(bytes), source, Storage::State::unused));
    }
  }
  template <TPosition position>
  void InitBuffer(TBuf<position>& buffer, std::uint64_t bytes) {
    buffer.storage = std::make_unique<Storage>(take(bytes), position, Storage::State::calculation);
  }
  event_t FetchEventID(HardEvent) { return 0; }

 private:
  std::uint64_t take(std::uint64_t bytes) {
    require(bytes > 0, "InitBuffer: of no bytes");
    const std::uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    core().used_bytes += rounded;
    require(core().used_bytes <= core().unified_bytes, "the unified buffer holds " + std::to_string(core().unified_bytes) +
                                                           " bytes, buffers take " + std::to_string(core().used_bytes));
    return rounded;
  }
};

// -- transfers --------------------------------------------------------------------------------------------------------

struct DataCopyExtParams {
  std::uint16_t blockCount;
  std::uint32_t blockLen, srcStride, dstStride, rsv;
};

template <typename T>
struct DataCopyPadExtParams {
  bool isPad;
  std::uint8_t leftPadding, rightPadding;
  T paddingValue;
};

template <typename T>
void check_transfer(const LocalTensor<T>& local, const GlobalTensor<T>& global, const DataCopyExtParams& shape, std::uint32_t local_gap,
                    std::uint32_t global_gap) {
  require(shape.blockCount >= 1 && shape.blockCount <= 4095, "DataCopyPad: blockCount " + std::to_string(shape.blockCount));
  require(shape.blockLen >= 1 && shape.blockLen <= 2097151 && shape.blockLen % sizeof(T) == 0,
          "DataCopyPad: blockLen " + std::to_string(shape.blockLen));
  require(local.offset() % kAlignment == 0, "DataCopyPad: the address in the unified buffer is no multiple of 32");
  const std::uint64_t padded = (shape.blockLen + kAlignment - 1) / kAlignment * kAlignment, last = shape.blockCount - 1u;
  require(last * (padded + local_gap * kAlignment) + padded <= local.bytes_left(), "DataCopyPad: beyond the buffer");
  require(last * (std::uint64_t{shape.blockLen} + global_gap) + shape.blockLen <= global.size() * sizeof(T), "DataCopyPad: beyond the global tensor");
}

template <typename T>
void DataCopyPad(const LocalTensor<T>& target, const GlobalTensor<T>& source, const DataCopyExtParams& shape, const DataCopyPadExtParams<T>& padding) {
  require(!padding.isPad, "DataCopyPad: this shim does not pad with values");
  require(target.storage()->state == Storage::State::filling && target.storage()->filled_by == TPosition::VECIN,
          "DataCopyPad: the target must be a tensor that AllocTensor of a VECIN queue gave");
  check_transfer(target, source, shape, shape.dstStride, shape.srcStride);
  target.storage()->transfer_wrote = ++core().now;
  const std::uint64_t padded = (shape.blockLen + kAlignment - 1) / kAlignment * kAlignment;
  for (std::uint64_t block = 0; block < shape.blockCount; ++block) {
    std::memcpy(reinterpret_cast<std::uint8_t*>(target.data()) + block * (padded + shape.dstStride * kAlignment),
                reinterpret_cast<const std::uint8_t*>(source.data()) + block * (std::uint64_t{shape.blockLen} + shape.srcStride), shape.blockLen);
  }
}

template <typename T>
void DataCopyPad(const GlobalTensor<T>& target, const LocalTensor<T>& source, const DataCopyExtParams& shape) {
  require(source.storage()->state == Storage::State::taken, "DataCopyPad: the source must be a tensor that DeQue gave");
  check_transfer(source, target, shape, shape.srcStride, shape.dstStride);
  const std::uint64_t padded = (shape.blockLen + kAlignment - 1) / kAlignment * kAlignment;
  for (std::uint64_t block = 0; block < shape.blockCount; ++block) {
    std::uint8_t* place = reinterpret_cast<std::uint8_t*>(target.data()) + block * (std::uint64_t{shape.blockLen} + shape.dstStride);
    std::memcpy(place, reinterpret_cast<const std::uint8_t*>(source.data()) + block * (padded + shape.srcStride * kAlignment), shape.blockLen);
    const std::ptrdiff_t at = place - core().written_base;
    if (at >= 0 && at + shape.blockLen <= static_cast<std::ptrdiff_t>(core().written.size())) {
      for (std::uint32_t byte = 0; byte < shape.blockLen; ++byte) ++core().written[at + byte];
    }
  }
}

// -- the vector unit --------------------------------------------------------------------------------------------------

template <typename T>
void check_operand(const LocalTensor<T>& tensor, std::int32_t count, bool written) {
  require(tensor.offset() % kAlignment == 0, "vector instruction: an address is no multiple of 32");
  require(count > 0 && count * sizeof(T) <= tensor.bytes_left(), "vector instruction: beyond the buffer");
  Storage* storage = tensor.storage();
  const bool filled_by_transfer = storage->filled_by == TPosition::VECIN;
  require(storage->state != Storage::State::unused && storage->state != Storage::State::queued, "vector instruction: on a tensor that is queued or freed");
  require(!filled_by_transfer || storage->state == Storage::State::taken, "vector instruction: on a tensor whose transfer has not been waited for");
  if (written) storage->vector_wrote = ++core().now;
}

template <typename T, typename Function>
void unary(const LocalTensor<T>& target, const LocalTensor<T>& source, std::int32_t count, Function&& function) {
  check_operand(source, count, false);
  check_operand(target, count, true);
  for (std::int32_t i = 0; i < count; ++i) target.data()[i] = function(source.data()[i]);
}

template <typename T, typename Function>
void binary(const LocalTensor<T>& target, const LocalTensor<T>& a, const LocalTensor<T>& b, std::int32_t count, Function&& function) {
  check_operand(a, count, false);
  check_operand(b, count, false);
  check_operand(target, count, true);
  for (std::int32_t i = 0; i < count; ++i) target.data()[i] = function(a.data()[i], b.data()[i]);
}

inline void Add(const LocalTensor<float>& out, const LocalTensor<float>& a, const LocalTensor<float>& b, std::int32_t count) {
  binary(out, a, b, count, [](float x, float y) { return x + y; });
}
inline void Sub(const LocalTensor<float>& out, const LocalTensor<float>& a, const LocalTensor<float>& b, std::int32_t count) {
  binary(out, a, b, count, [](float x, float y) { return x - y; });
}
inline void Div(const LocalTensor<float>& out, const LocalTensor<float>& a, const LocalTensor<float>& b, std::int32_t count) {
  binary(out, a, b, count, [](float x, float y) { return x / y; });
}
inline void Max(const LocalTensor<float>& out, const LocalTensor<float>& a, const LocalTensor<float>& b, std::int32_t count) {
  binary(out, a, b, count, [](float x, float y) { return x > y ? x : y; });
}
inline void Maxs(const LocalTensor<float>& out, const LocalTensor<float>& a, float scalar, std::int32_t count) {
  unary(out, a, count, [scalar](float x) { return x > scalar ? x : scalar; });
}
inline void Muls(const LocalTensor<float>& out, const LocalTensor<float>& a, float scalar, std::int32_t count) {
  unary(out, a, count, [scalar](float x) { return x * scalar; });
}
inline void Exp(const LocalTensor<float>& out, const LocalTensor<float>& a, std::int32_t count) {
  unary(out, a, count, [](float x) { return std::exp(x); });
}
inline void Ln(const LocalTensor<float>& out, const LocalTensor<float>& a, std::int32_t count) {
  unary(out, a, count, [](float x) { return std::log(x); });
}

template <typename T>
void Duplicate(const LocalTensor<T>& out, T value, std::int32_t count) {
  check_operand(out, count, true);
  for (std::int32_t i = 0; i < count; ++i) out.data()[i] = value;
}

template <typename To, typename From>
void Cast(const LocalTensor<To>& out, const LocalTensor<From>& in, RoundMode mode, std::int32_t count) {
  static_assert(sizeof(To) != sizeof(From), "between float and a short type");
  require((sizeof(To) < sizeof(From)) == (mode == RoundMode::CAST_RINT), "Cast: narrowing rounds to nearest even here, widening doesn't round");
  check_operand(in, count, false);
  check_operand(out, count, true);
  for (std::int32_t i = 0; i < count; ++i) hp::narrow(hp::widen(in.data()[i]), out.data()[i]);
}

}  // namespace AscendC
