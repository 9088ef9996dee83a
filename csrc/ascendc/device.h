// What the kernels share: reading their arguments, ordering the pipes, and staging what they write.
//
// Scalars are read from global memory through the Params' pointers, by the rules in core/. Nothing is ever stored there
// by a scalar: the scalar caches of two cores would overwrite each other's halves of a line. Results gather in the
// unified buffer and leave it by copies of exactly their bytes.
#pragma once

#include "ascendc/launch_args.h"
#include "ascendc/tilings.h"
#include "kernel_operator.h"

namespace ngram_npu::ascendc {

// The words of an argument as the struct that the host copied into them.
template <class T, int32_t words>
__aicore__ inline T read_as(const uint64_t (&from)[words]) {
  static_assert(sizeof(T) <= sizeof(from));
  union {
    uint64_t copy[words];
    T value;
  } both;
  for (int32_t i = 0; i < words; ++i) both.copy[i] = from[i];
  return both.value;
}

// What the second pipe of the event does from here on waits for what the first has been told so far.
template <AscendC::HardEvent event>
__aicore__ inline void order() {
  const int32_t id = static_cast<int32_t>(GetTPipePtr()->FetchEventID(event));
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// A launch may have more cores than one of its shares.
__aicore__ inline int64_t first_item(const Shares& shares) {
  const int64_t core = AscendC::GetBlockIdx();
  return core < shares.cores ? core * shares.per_pass : INT64_MAX;
}
__aicore__ inline int64_t items_between(const Shares& shares) { return shares.cores * shares.per_pass; }

// A copy of `count` items and not a byte more.
template <class T>
__aicore__ inline AscendC::DataCopyExtParams one_block(int64_t count) {
  return AscendC::DataCopyExtParams(1, static_cast<uint32_t>(count * int64_t{sizeof(T)}), 0, 0, 0);
}

// A piece of the unified buffer for as long as the kernel runs, read and written by scalars, vectors and copies; which
// of these wait for which is the kernel's to say by order().
template <class T>
class Local {
 public:
  __aicore__ inline Local(AscendC::TPipe& pipe, int64_t capacity) {
    constexpr int64_t kUnit = 32;  // bytes
    const int64_t bytes = (capacity * int64_t{sizeof(T)} + kUnit - 1) / kUnit * kUnit;
    pipe.InitBuffer(buffer_, static_cast<uint32_t>(bytes));
    tensor_ = buffer_.template Get<T>();
  }

  __aicore__ inline const AscendC::LocalTensor<T>& tensor() const { return tensor_; }
  __aicore__ inline T get(int64_t i) const { return tensor_.GetValue(static_cast<uint32_t>(i)); }
  __aicore__ inline void set(int64_t i, T value) { tensor_.SetValue(static_cast<uint32_t>(i), value); }

  // Items [at, at + count) from and to a tensor; `at` items are a multiple of 32 bytes.
  __aicore__ inline void load(int64_t at, Gm<const T> from, int64_t count) {
    if (count <= 0) return;
    AscendC::GlobalTensor<T> global;
    global.SetGlobalBuffer((Gm<T>)from, static_cast<uint64_t>(count));  // a class on the twin: no const_cast
    AscendC::DataCopyPad(tensor_[static_cast<uint32_t>(at)], global, one_block<T>(count),
                         AscendC::DataCopyPadExtParams<T>());
  }
  __aicore__ inline void store(int64_t at, Gm<T> to, int64_t count) {
    if (count <= 0) return;
    AscendC::GlobalTensor<T> global;
    global.SetGlobalBuffer(to, static_cast<uint64_t>(count));
    AscendC::DataCopyPad(global, tensor_[static_cast<uint32_t>(at)], one_block<T>(count));
  }

 private:
  AscendC::TBuf<AscendC::TPosition::VECCALC> buffer_;
  AscendC::LocalTensor<T> tensor_;
};

// An array that scalars go through from front to back, a stretch of it at a time in the unified buffer: every core goes
// through all requests, and scalar loads from global memory would wait for each line of the cache.
class Sequence {
 public:
  __aicore__ inline Sequence(AscendC::TPipe& pipe, Gm<const int32_t> array, int64_t size)
      : array_(array), size_(size), stretch_(pipe, kStretch) {}

  // Whether items i and i + 1, where there are such, can be read.
  __aicore__ inline bool has(int64_t i) const {
    return first_ <= i && (i + 1 < first_ + kStretch || first_ + kStretch >= size_);
  }
  // Those from `first` on; the caller orders the copy.
  __aicore__ inline void load(int64_t first) {
    first_ = first;
    stretch_.load(0, array_ + first, smaller(kStretch, size_ - first));
  }
  __aicore__ inline void reach(int64_t i) {
    if (has(i)) return;
    order<AscendC::HardEvent::S_MTE2>();
    load(i);
    order<AscendC::HardEvent::MTE2_S>();
  }
  __aicore__ inline int32_t operator[](int64_t i) const { return stretch_.get(i - first_); }

 private:
  const Gm<const int32_t> array_;
  const int64_t size_;
  Local<int32_t> stretch_;
  int64_t first_ = INT64_MAX;
};

}  // namespace ngram_npu::ascendc
