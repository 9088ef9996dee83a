// The part of LocalTensor, GlobalTensor, TPipe with its queues and buffers, flags, and DataCopyPad that the kernels
// use. DataCopyPad copies single blocks without padding, by MTE2 from global memory to UB, and by MTE3 back.
#pragma once

#include <algorithm>
#include <cstring>

#include "core.h"
#include "gm_pointer.h"

namespace AscendC {

using ::ngram_npu::twin::Core;
using ::ngram_npu::twin::kChip;
using ::ngram_npu::twin::TensorLocation;

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  LocalTensor(TensorLocation location, uint32_t size) : location_(location), size_(size) {}

  T GetValue(const uint32_t index) const {
    Core& core = begin_scalar_access("LocalTensor::GetValue", index);
    const uint8_t* memory = core.read(locate_element(index), sizeof(T), sizeof(T));
    const uint8_t* shadow = core.shadow(memory);
    for (size_t i = 0; i < sizeof(T); ++i)
      if (shadow[i] != 0) core.fail_on_poison();
    T value;
    std::memcpy(&value, memory, sizeof(T));
    return value;
  }

  template <class S>
  void SetValue(const uint32_t index, const S value) const {
    Core& core = begin_scalar_access("LocalTensor::SetValue", index);
    uint8_t* memory = core.write(locate_element(index), sizeof(T), sizeof(T));
    const T element = static_cast<T>(value);
    std::memcpy(memory, &element, sizeof(T));
    std::memset(core.shadow(memory), 0, sizeof(T));
  }

  template <class U>
  LocalTensor<U> ReinterpretCast() const {
    return {location_, static_cast<uint32_t>(size_ * sizeof(T) / sizeof(U))};
  }

  LocalTensor operator[](const uint32_t offset) const {
    NGRAM_TWIN_CHECK(offset <= size_, "block %d: LocalTensor[%u] of %u elements", Core::current().block(), offset,
                     size_);
    return {locate_element(offset), size_ - offset};
  }

  uint32_t GetSize() const { return size_; }

  const TensorLocation& location() const { return location_; }

 private:
  TensorLocation locate_element(uint32_t index) const {
    TensorLocation location = location_;
    location.address += index * static_cast<uint32_t>(sizeof(T));
    return location;
  }

  Core& begin_scalar_access(const char* call_name, uint32_t index) const {
    Core& core = Core::current();
    core.issue(::ngram_npu::twin::kS, call_name);
    NGRAM_TWIN_CHECK(index < size_, "block %d: %s(%u) of %u elements", core.block(), call_name, index, size_);
    ++core.cost[::ngram_npu::twin::kScalarUb];
    core.add_scalar_ub_cost();
    return core;
  }

  TensorLocation location_;
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

// A flag that one pipe sets and another pipe waits for: setting pipe * kNumPipes + waiting pipe.
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

// A queue of buffers that MTE2 fills and V reads. It orders only these two pipes. A slot is a buffer's index in it.
template <TPosition pos, int32_t depth>
class TQue {
  static_assert(pos == TPosition::VECIN, "the twin has queues at VECIN only");
  static_assert(depth >= 1, "the twin does not have queues of depth 0");
  static constexpr HardEvent kFull = HardEvent::MTE2_V, kEmpty = HardEvent::V_MTE2;
  static constexpr int kFullEvent = static_cast<int>(kFull), kEmptyEvent = static_cast<int>(kEmpty);

 public:
  template <class T>
  LocalTensor<T> AllocTensor() {
    Core& core = Core::current();
    NGRAM_TWIN_CHECK(num_buffers_ > 0, "block %d: AllocTensor of a queue without InitBuffer", core.block());
    for (int i = 0; i < num_buffers_; ++i) {
      const int slot = next_slot_;
      next_slot_ = (next_slot_ + 1) % num_buffers_;
      if (core.buffer(first_buffer_ + slot).state != ngram_npu::twin::BufferState::kFree) continue;
      core.wait_for_release(first_buffer_ + slot);
      core.buffer(first_buffer_ + slot).was_allocated = true;
      return {core.allocate(first_buffer_ + slot),
              core.buffer(first_buffer_ + slot).bytes / static_cast<uint32_t>(sizeof(T))};
    }
    NGRAM_TWIN_FAULT("block %d: AllocTensor: all %d buffers of the queue are in use, the core would hang", core.block(),
                     num_buffers_);
  }

  template <class T>
  bool EnQue(const LocalTensor<T>& tensor) {
    Core& core = Core::current();
    const int slot = find_slot(tensor, "EnQue");
    NGRAM_TWIN_CHECK(num_queued_ < depth, "block %d: EnQue: the queue holds its depth of %d already", core.block(),
                     depth);
    full_event_ids_[slot] = core.alloc_event(kFullEvent);
    SetFlag<kFull>(full_event_ids_[slot]);
    core.buffer(first_buffer_ + slot).state = ngram_npu::twin::BufferState::kQueued;
    ++core.buffer(first_buffer_ + slot).generation;
    queued_slots_[(head_ + num_queued_++) % depth] = slot;
    return true;
  }

  template <class T>
  LocalTensor<T> DeQue() {
    Core& core = Core::current();
    NGRAM_TWIN_CHECK(num_queued_ > 0, "block %d: DeQue from an empty queue", core.block());
    const int slot = queued_slots_[head_];
    head_ = (head_ + 1) % depth;
    --num_queued_;
    WaitFlag<kFull>(full_event_ids_[slot]);
    core.release_event(kFullEvent, full_event_ids_[slot]);
    core.buffer(first_buffer_ + slot).state = ngram_npu::twin::BufferState::kAllocated;
    return {core.locate(first_buffer_ + slot),
            core.buffer(first_buffer_ + slot).bytes / static_cast<uint32_t>(sizeof(T))};
  }

  template <class T>
  void FreeTensor(LocalTensor<T>& tensor) {
    Core& core = Core::current();
    const int slot = find_slot(tensor, "FreeTensor");
    core.release(first_buffer_ + slot);
    const int id = core.alloc_event(kEmptyEvent);
    SetFlag<kEmpty>(id);
    core.buffer(first_buffer_ + slot).release_flag = {kEmptyEvent, id};
  }

 private:
  friend class TPipe;

  template <class T>
  int find_slot(const LocalTensor<T>& tensor, const char* call_name) {
    Core& core = Core::current();
    core.get_live_buffer(tensor.location(), call_name);
    const int slot = tensor.location().buffer - first_buffer_;
    NGRAM_TWIN_CHECK(slot >= 0 && slot < num_buffers_, "block %d: %s: the tensor is not this queue's", core.block(),
                     call_name);
    return slot;
  }

  static constexpr int kMaxSlots = ::ngram_npu::twin::kMaxBuffers;
  int32_t first_buffer_ = 0;
  int num_buffers_ = 0;
  int next_slot_ = 0;             // at which AllocTensor begins to search
  int queued_slots_[depth] = {};  // a ring
  int head_ = 0;                  // index in queued_slots_ of the slot that DeQue returns next
  int num_queued_ = 0;
  int full_event_ids_[kMaxSlots] = {};
};

template <TPosition pos = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() {
    Core& core = Core::current();
    NGRAM_TWIN_CHECK(bytes_ > 0, "block %d: TBuf without InitBuffer", core.block());
    return {core.locate(buffer_), bytes_ / static_cast<uint32_t>(sizeof(T))};
  }

 private:
  friend class TPipe;
  int32_t buffer_ = -1;
  uint32_t bytes_ = 0;
};

class TPipe {
 public:
  TPipe() {
    Core::current().record_tpipe_construction();
    current() = this;
  }
  // Waits for the last users of the queues' buffers, as on the device.
  ~TPipe() noexcept(false) {
    current() = nullptr;
    if (std::uncaught_exceptions() > 0) return;
    Core::current().finish_tpipe();
  }
  TPipe(const TPipe&) = delete;

  template <TPosition pos, int32_t depth>
  bool InitBuffer(TQue<pos, depth>& que, uint8_t num, uint32_t len) {
    using Que = TQue<pos, depth>;
    NGRAM_TWIN_CHECK(num >= 1 && num <= Que::kMaxSlots, "InitBuffer: %d buffers of a queue", num);
    NGRAM_TWIN_CHECK(que.num_buffers_ == 0, "InitBuffer: the queue has buffers already");
    que.num_buffers_ = num;
    for (int slot = 0; slot < num; ++slot) {
      const int32_t buffer = Core::current().new_buffer(len);
      if (slot == 0) que.first_buffer_ = buffer;
    }
    return true;
  }
  template <TPosition pos>
  bool InitBuffer(TBuf<pos>& buf, uint32_t len) {
    buf.buffer_ = Core::current().new_buffer(len);
    Core::current().buffer(buf.buffer_).state = ngram_npu::twin::BufferState::kAllocated;
    Core::current().buffer(buf.buffer_).allows_copies =
        pos != TPosition::VECCALC || ngram_npu::twin::kChip.copies_with_pad_at_calc;
    Core::current().buffer(buf.buffer_).allows_atomics = pos == TPosition::VECOUT;
    buf.bytes_ = Core::current().buffer(buf.buffer_).bytes;
    return true;
  }

  // Reserves an ID until ReleaseEventID().
  template <HardEvent event>
  TEventID AllocEventID() {
    return static_cast<TEventID>(Core::current().alloc_event(static_cast<int>(event)));
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    Core::current().check_and_release_event(static_cast<int>(event), id);
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

// The device's header also declares this function outside the namespace AscendC.
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

inline uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

// Checks the parameters of a copy and returns the number of copied bytes.
inline uint64_t check_copy(Core& core, const TensorLocation& ub, const AscendC::DataCopyExtParams& p,
                           uint64_t item_bytes) {
  NGRAM_TWIN_CHECK(
      core.get_live_buffer(ub, "DataCopyPad").allows_copies,
      "block %d: DataCopyPad: expected a TBuf at VECIN or VECOUT, got a TBuf at VECCALC, which is not documented",
      core.block());
  NGRAM_TWIN_CHECK(p.blockCount == 1 && p.srcStride == 0 && p.dstStride == 0,
                   "block %d: DataCopyPad: the twin copies single blocks without strides, got %u blocks", core.block(),
                   p.blockCount);
  NGRAM_TWIN_CHECK(p.blockLen >= 1 && p.blockLen <= kMaxPadBlockBytes,
                   "block %d: DataCopyPad: blockLen %u, the limit is %u", core.block(), p.blockLen, kMaxPadBlockBytes);
  NGRAM_TWIN_CHECK(p.blockLen % item_bytes == 0,
                   "block %d: DataCopyPad: blockLen %u is no multiple of the element's %u bytes", core.block(),
                   p.blockLen, static_cast<unsigned>(item_bytes));
  return p.blockLen;
}

// Stores the maximum of each element and the element in global memory. Cores of other threads may do the same.
template <class T>
void copy_maximum(Core& core, const TensorLocation& ub, uintptr_t address, const uint8_t* source, uint64_t bytes) {
  NGRAM_TWIN_CHECK(core.get_live_buffer(ub, "DataCopyPad").allows_atomics,
                   "block %d: DataCopyPad: atomic copies must come from a TBuf at VECOUT", core.block());
  NGRAM_TWIN_CHECK(core.atomic_dtype() == get_dtype<T>(),
                   "block %d: DataCopyPad: SetAtomicMax was called with another element type", core.block());
  NGRAM_TWIN_CHECK(address % sizeof(T) == 0, "block %d: DataCopyPad: atomic copy to %p, not aligned to its elements",
                   core.block(), reinterpret_cast<void*>(address));
  for (uint64_t i = 0; i < bytes / sizeof(T); ++i) {
    T value;
    std::memcpy(&value, source + i * sizeof(T), sizeof(T));
    T* const element = reinterpret_cast<T*>(address) + i;
    T old = __atomic_load_n(element, __ATOMIC_RELAXED);
    while (old < value &&
           !__atomic_compare_exchange_n(element, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
  }
}

}  // namespace ngram_npu::twin

namespace AscendC {

// Copies from global memory to UB. The bytes after the data, up to a multiple of 32 bytes, become poison.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 const DataCopyPadExtParams<T>&) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::check_copy(core, dst.location(), dataCopyParams, sizeof(T));
  const uint64_t rounded = ngram_npu::twin::round_up(bytes, ngram_npu::twin::kBlockBytes);
  core.issue(ngram_npu::twin::kMte2, "DataCopyPad");
  core.record_gm_copy(src.address(), bytes, ngram_npu::twin::CopyKind::kRead);
  uint8_t* ub = core.write(dst.location(), rounded);
  std::memcpy(ub, reinterpret_cast<const void*>(src.address()), bytes);
  std::memset(core.shadow(ub), 0, bytes);
  std::memset(core.shadow(ub) + bytes, 0xFF, rounded - bytes);
  core.add_copy_cost(bytes, false);
}
// Copies from UB to global memory.
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::check_copy(core, src.location(), dataCopyParams, sizeof(T));
  core.issue(ngram_npu::twin::kMte3, "DataCopyPad");
  const uint8_t* ub = core.read(src.location(), bytes);
  const uint8_t* shadow = core.shadow(ub);
  if (std::any_of(shadow, shadow + bytes, [](uint8_t s) { return s != 0; })) core.fail_on_poison();
  const bool is_atomic = core.atomic_dtype() != ngram_npu::twin::kNoType;
  core.record_gm_copy(dst.address(), bytes,
                      is_atomic ? ngram_npu::twin::CopyKind::kAtomic : ngram_npu::twin::CopyKind::kWrite);
  if (is_atomic) {
    ngram_npu::twin::copy_maximum<T>(core, src.location(), dst.address(), ub, bytes);
  } else {
    std::memcpy(reinterpret_cast<void*>(dst.address()), ub, bytes);
  }
  core.add_copy_cost(bytes, true);
}

// Makes the following copies from VECOUT to global memory atomic: the larger of old and new element is stored.
template <class T>
void SetAtomicMax() {
  static_assert(ngram_npu::twin::is_offered<T>(ngram_npu::twin::Call::kSetAtomicMax),
                "this chip does not offer the call on this element type");
  Core::current().set_atomic_max(ngram_npu::twin::get_dtype<T>());
}
inline void SetAtomicNone() { Core::current().set_atomic_max(ngram_npu::twin::kNoType); }

}  // namespace AscendC
