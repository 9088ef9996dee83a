// LocalTensor, GlobalTensor, TPipe with its queues and buffers, flags, and DataCopyPad (MTE2 copies from global memory
// to UB, MTE3 back), as far as the kernels use them. They copy single blocks without padding.
#pragma once

#include <algorithm>

#include "core.h"
#include "gm_pointer.h"

namespace AscendC {

using ::ngram_npu::twin::Core;
using ::ngram_npu::twin::kChip;
using ::ngram_npu::twin::Place;

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(Place place, uint32_t size) : place_(place), size_(size) {}

  T GetValue(const uint32_t index) const {
    Core& core = scalar("LocalTensor::GetValue", index);
    const uint8_t* at = core.read(element(index), sizeof(T), sizeof(T));
    const uint8_t* shadow = core.shadow(at);
    for (size_t i = 0; i < sizeof(T); ++i)
      if (shadow[i] != 0) core.poisoned();
    T value;
    std::memcpy(&value, at, sizeof(T));
    return value;
  }

  template <class S>
  void SetValue(const uint32_t index, const S value) const {
    Core& core = scalar("LocalTensor::SetValue", index);
    uint8_t* at = core.write(element(index), sizeof(T), sizeof(T));
    const T stored = static_cast<T>(value);
    std::memcpy(at, &stored, sizeof(T));
    std::memset(core.shadow(at), 0, sizeof(T));
  }

  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    return {place_, static_cast<uint32_t>(size_ * sizeof(T) / sizeof(U))};
  }

  LocalTensor operator[](const uint32_t offset) const {
    NGRAM_TWIN_CHECK(offset <= size_, "block %d: LocalTensor[%u] of %u elements", Core::current().block(), offset,
                     size_);
    return {element(offset), size_ - offset};
  }

  uint32_t GetSize() const { return size_; }

  const Place& place() const { return place_; }

 private:
  Place element(uint32_t index) const {
    Place at = place_;
    at.address += index * static_cast<uint32_t>(sizeof(T));
    return at;
  }

  Core& scalar(const char* what, uint32_t index) const {
    Core& core = Core::current();
    core.issue(::ngram_npu::twin::kS, what);
    NGRAM_TWIN_CHECK(index < size_, "block %d: %s(%u) of %u elements", core.block(), what, index, size_);
    ++core.cost[::ngram_npu::twin::kScalarUb];
    core.scalar_ub_cost();
    return core;
  }

  Place place_;
  uint32_t size_ = 0;
};

template <class T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(ngram_npu::twin::GmPointer<T> buffer, uint64_t) {
    address_ = reinterpret_cast<uintptr_t>(buffer.raw());
  }

  uintptr_t address() const { return address_; }

 private:
  uintptr_t address_ = 0;
};

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
using TEventID = int8_t;

// From a pipe to another: from * kPipes + to.
enum class HardEvent : uint8_t {
  S_V = 1,
  S_MTE2 = 2,
  S_MTE3 = 3,
  V_S = 4,
  V_MTE2 = 6,
  V_MTE3 = 7,
  MTE2_S = 8,
  MTE2_V = 9,
  MTE2_MTE3 = 11,
  MTE3_S = 12,
  MTE3_V = 13,
  MTE3_MTE2 = 14,
};

template <HardEvent event>
void SetFlag(int32_t eventID) {
  Core::current().set_flag(static_cast<int>(event), eventID);
}

template <HardEvent event>
void WaitFlag(int32_t eventID) {
  Core::current().wait_flag(static_cast<int>(event), eventID);
}

inline int64_t GetBlockIdx() { return Core::current().block(); }

// A queue from MTE2 to V. It orders only the steps between these pipes.
template <TPosition pos, int32_t depth>
class TQue {
  static_assert(pos == TPosition::VECIN, "the twin has queues at VECIN");
  static_assert(depth >= 1, "a queue of depth 0 is another kind, which the twin has not");
  static constexpr HardEvent kFull = HardEvent::MTE2_V, kEmpty = HardEvent::V_MTE2;
  static constexpr int kFullEvent = static_cast<int>(kFull), kEmptyEvent = static_cast<int>(kEmpty);

 public:
  template <class T>
  LocalTensor<T> AllocTensor() {
    Core& core = Core::current();
    NGRAM_TWIN_CHECK(count_ > 0, "block %d: AllocTensor of a queue without InitBuffer", core.block());
    for (int tried = 0; tried < count_; ++tried) {
      const int slot = cursor_;
      cursor_ = (cursor_ + 1) % count_;
      if (core.buffer(first_ + slot).state != ngram_npu::twin::BufferState::kFree) continue;
      core.wait_until_emptied(first_ + slot);
      core.buffer(first_ + slot).queued_ever = true;
      return {core.allocate(first_ + slot), core.buffer(first_ + slot).bytes / static_cast<uint32_t>(sizeof(T))};
    }
    NGRAM_TWIN_FAULT("block %d: AllocTensor: all %d buffers of the queue are in use, the core would hang", core.block(),
                     count_);
  }

  template <class T>
  bool EnQue(const LocalTensor<T>& tensor) {
    Core& core = Core::current();
    const int slot = slot_of(tensor, "EnQue");
    NGRAM_TWIN_CHECK(queued_ < depth, "block %d: EnQue: the queue holds its depth of %d already", core.block(), depth);
    full_[slot] = core.alloc_event(kFullEvent);
    SetFlag<kFull>(full_[slot]);
    core.buffer(first_ + slot).state = ngram_npu::twin::BufferState::kQueued;
    ++core.buffer(first_ + slot).generation;
    line_[(head_ + queued_++) % depth] = slot;
    return true;
  }

  template <class T>
  LocalTensor<T> DeQue() {
    Core& core = Core::current();
    NGRAM_TWIN_CHECK(queued_ > 0, "block %d: DeQue from an empty queue", core.block());
    const int slot = line_[head_];
    head_ = (head_ + 1) % depth;
    --queued_;
    WaitFlag<kFull>(full_[slot]);
    core.release_event(kFullEvent, full_[slot]);
    core.buffer(first_ + slot).state = ngram_npu::twin::BufferState::kAllocated;
    return {core.place(first_ + slot), core.buffer(first_ + slot).bytes / static_cast<uint32_t>(sizeof(T))};
  }

  template <class T>
  void FreeTensor(LocalTensor<T>& tensor) {
    Core& core = Core::current();
    const int slot = slot_of(tensor, "FreeTensor");
    core.release(first_ + slot);
    const int id = core.alloc_event(kEmptyEvent);
    SetFlag<kEmpty>(id);
    core.buffer(first_ + slot).emptied = {kEmptyEvent, id};
  }

 private:
  friend class TPipe;

  template <class T>
  int slot_of(const LocalTensor<T>& tensor, const char* what) {
    Core& core = Core::current();
    core.live(tensor.place(), what);
    const int slot = tensor.place().buffer - first_;
    NGRAM_TWIN_CHECK(slot >= 0 && slot < count_, "block %d: %s: the tensor is not this queue's", core.block(), what);
    return slot;
  }

  static constexpr int kMaxSlots = 16;
  int32_t first_ = 0;
  int count_ = 0;
  int cursor_ = 0;
  int head_ = 0;
  int queued_ = 0;
  int line_[depth] = {};
  int full_[kMaxSlots] = {};
};

template <TPosition pos = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() {
    Core& core = Core::current();
    NGRAM_TWIN_CHECK(bytes_ > 0, "block %d: TBuf without InitBuffer", core.block());
    return {core.place(buffer_), bytes_ / static_cast<uint32_t>(sizeof(T))};
  }

 private:
  friend class TPipe;
  int32_t buffer_ = -1;
  uint32_t bytes_ = 0;
};

class TPipe {
 public:
  TPipe() {
    Core::current().pipe_made();
    current() = this;
  }
  // Waits for the last users of the queues' buffers, as the device's does.
  ~TPipe() noexcept(false) {
    current() = nullptr;
    if (std::uncaught_exceptions() > 0) return;
    Core::current().pipe_gone();
  }
  TPipe(const TPipe&) = delete;

  template <TPosition pos, int32_t depth>
  bool InitBuffer(TQue<pos, depth>& que, uint8_t num, uint32_t len) {
    using Que = TQue<pos, depth>;
    NGRAM_TWIN_CHECK(num >= 1 && num <= Que::kMaxSlots, "InitBuffer: %d buffers of a queue", num);
    NGRAM_TWIN_CHECK(que.count_ == 0, "InitBuffer: the queue has buffers already");
    que.count_ = num;
    for (int slot = 0; slot < num; ++slot) {
      const int32_t buffer = Core::current().new_buffer(len);
      if (slot == 0) que.first_ = buffer;
    }
    return true;
  }
  template <TPosition pos>
  bool InitBuffer(TBuf<pos>& buf, uint32_t len) {
    buf.buffer_ = Core::current().new_buffer(len);
    Core::current().buffer(buf.buffer_).state = ngram_npu::twin::BufferState::kAllocated;
    Core::current().buffer(buf.buffer_).copies =
        pos != TPosition::VECCALC || ngram_npu::twin::kChip.copies_with_pad_at_calc;
    buf.bytes_ = Core::current().buffer(buf.buffer_).bytes;
    return true;
  }

  TEventID FetchEventID(HardEvent event) {
    return static_cast<TEventID>(Core::current().fetch_event(static_cast<int>(event)));
  }

  static TPipe*& current() {
    static thread_local TPipe* pipe = nullptr;
    return pipe;
  }
};

}  // namespace AscendC

// Not in AscendC: where the device's header has it.
inline AscendC::TPipe* GetTPipePtr() {
  NGRAM_TWIN_CHECK(AscendC::TPipe::current() != nullptr, "GetTPipePtr: the kernel has no TPipe");
  return AscendC::TPipe::current();
}

namespace AscendC {

struct DataCopyExtParams {
  using Stride = std::conditional_t<kChip.arch == 3510, int64_t, uint32_t>;
  DataCopyExtParams(const uint16_t count, const uint32_t len, const Stride srcStrideIn, const Stride dstStrideIn,
                    const uint32_t)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn) {}
  uint16_t blockCount;
  uint32_t blockLen;
  Stride srcStride;
  Stride dstStride;
};

template <class T>
struct DataCopyPadExtParams {};

}  // namespace AscendC

namespace ngram_npu::twin {

inline uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

inline uint64_t copied_bytes(Core& core, const Place& ub, const AscendC::DataCopyExtParams& p, uint64_t unit) {
  NGRAM_TWIN_CHECK(core.live(ub, "DataCopyPad").copies,
                   "block %d: DataCopyPad: a TBuf at VECCALC, which this chip does not document: VECIN or VECOUT",
                   core.block());
  NGRAM_TWIN_CHECK(p.blockCount == 1 && p.srcStride == 0 && p.dstStride == 0,
                   "block %d: DataCopyPad: the twin has single blocks, not %u or strides", core.block(), p.blockCount);
  NGRAM_TWIN_CHECK(p.blockLen >= 1 && p.blockLen <= kMaxPadBlockBytes,
                   "block %d: DataCopyPad: blockLen %u, the limit is %u", core.block(), p.blockLen, kMaxPadBlockBytes);
  NGRAM_TWIN_CHECK(p.blockLen % unit == 0,
                   "block %d: DataCopyPad: blockLen %u is no multiple of the element's %u bytes", core.block(),
                   p.blockLen, static_cast<unsigned>(unit));
  return p.blockLen;
}

}  // namespace ngram_npu::twin

namespace AscendC {

// The filling of the last 32 bytes is poison.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 const DataCopyPadExtParams<T>&) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::copied_bytes(core, dst.place(), dataCopyParams, sizeof(T));
  const uint64_t rounded = ngram_npu::twin::round_up(bytes, ngram_npu::twin::kBlockBytes);
  core.issue(ngram_npu::twin::kMte2, "DataCopyPad");
  core.gm_copy(src.address(), bytes, false);
  uint8_t* to = core.write(dst.place(), rounded);
  std::memcpy(to, reinterpret_cast<const void*>(src.address()), bytes);
  std::memset(core.shadow(to), 0, bytes);
  std::memset(core.shadow(to) + bytes, 0xFF, rounded - bytes);
  core.copy_cost(bytes, false);
}
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::copied_bytes(core, src.place(), dataCopyParams, sizeof(T));
  core.issue(ngram_npu::twin::kMte3, "DataCopyPad");
  const uint8_t* from = core.read(src.place(), bytes);
  const uint8_t* shadow = core.shadow(from);
  if (std::any_of(shadow, shadow + bytes, [](uint8_t s) { return s != 0; })) core.poisoned();
  core.gm_copy(dst.address(), bytes, true);
  std::memcpy(reinterpret_cast<void*>(dst.address()), from, bytes);
  core.copy_cost(bytes, true);
}

}  // namespace AscendC
