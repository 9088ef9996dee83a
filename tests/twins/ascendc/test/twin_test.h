// Helpers for tests of the model with wrong kernels, each wrong in one way, and with correct kernels.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "kernel_operator.h"

namespace ngram_npu::twin {

using AscendC::GlobalTensor;
using AscendC::HardEvent;
using AscendC::LocalTensor;
using AscendC::TBuf;
using AscendC::TPipe;
using AscendC::TPosition;
using AscendC::TQue;
using In = TQue<TPosition::VECIN, 2>;

// A tensor in global memory.
template <class T>
class Tensor {
 public:
  explicit Tensor(size_t size, T value = T{}) : values(size, value) {}
  Region region(bool writable = true) {
    return {
        "tensor", reinterpret_cast<uintptr_t>(values.data()), 1, values.size() * sizeof(T), values.size() * sizeof(T),
        writable};
  }
  // Returns the tensor from element `at`, which may lie outside of the tensor.
  GlobalTensor<T> global(uint64_t at = 0) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(GmPointer<T>(uint64_t{reinterpret_cast<uintptr_t>(values.data())} + at * sizeof(T)), 0);
    return tensor;
  }
  // Returns a pointer for scalar accesses.
  GmPointer<T> pointer() { return GmPointer<T>(values.data()); }
  std::vector<T> values;
};

inline std::string fault_of(const std::function<void()>& kernel, const std::vector<Region>& regions = {},
                            int32_t blocks = 1) {
  return run(regions, blocks, kernel, Options()).fault;
}

template <HardEvent event>
void sync_pipes() {
  const int32_t id = GetTPipePtr()->FetchEventID(event);
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// Waits until all pipes have completed the instructions that were issued before.
inline void sync_all_pipes() {
  sync_pipes<HardEvent::V_S>();
  sync_pipes<HardEvent::MTE2_S>();
  sync_pipes<HardEvent::MTE3_S>();
  sync_pipes<HardEvent::S_V>();
  sync_pipes<HardEvent::S_MTE2>();
  sync_pipes<HardEvent::S_MTE3>();
}

template <class T>
T value_of(const LocalTensor<T>& tensor, uint32_t i) {
  sync_all_pipes();
  return tensor.GetValue(i);
}

template <class T>
AscendC::DataCopyExtParams make_copy_params(uint32_t count) {
  return {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
}
template <class T>
void copy(const LocalTensor<T>& to, const GlobalTensor<T>& from, uint32_t count) {
  AscendC::DataCopyPad(to, from, make_copy_params<T>(count), AscendC::DataCopyPadExtParams<T>());
}
template <class T>
void copy(const GlobalTensor<T>& to, const LocalTensor<T>& from, uint32_t count) {
  AscendC::DataCopyPad(to, from, make_copy_params<T>(count));
}

// Fills a tensor with ones, or with zeros if Duplicate does not support the type.
template <class T>
void fill_in(const LocalTensor<T>& tensor, uint32_t len) {
  if constexpr (offers<T>(Call::kDuplicate)) {
    AscendC::Duplicate(tensor, T(1), static_cast<int32_t>(len));
  } else {
    AscendC::Duplicate(tensor.template ReinterpretCast<uint16_t>(), uint16_t{0},
                       static_cast<int32_t>(len * sizeof(T) / 2));
  }
}

// A tensor of `len` elements, and the pipe that owns its buffer.
template <class T>
struct Scratch {
  explicit Scratch(uint32_t len, bool filled = true) : tensor(allocate<T>(len, filled)) {}
  template <class U>
  LocalTensor<U> allocate(uint32_t len, bool filled = true) {
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, static_cast<uint32_t>(len * sizeof(U)));
    LocalTensor<U> allocated = buffer.template Get<U>();
    if (filled) fill_in(allocated, len);
    sync_all_pipes();
    return allocated;
  }
  TPipe pipe;
  LocalTensor<T> tensor;
};

// Returns a kernel that applies `use` to a Scratch of 64 elements.
template <class T, class Use>
std::function<void()> on(const Use& use, bool filled = true) {
  return [=] {
    Scratch<T> s(64, filled);
    use(s);
  };
}

}  // namespace ngram_npu::twin

#define EXPECT_CLEAN(...) EXPECT_EQ(::ngram_npu::twin::fault_of(__VA_ARGS__), "")
#define EXPECT_FAULT(message, ...)                                         \
  do {                                                                     \
    const std::string fault = ::ngram_npu::twin::fault_of(__VA_ARGS__);    \
    EXPECT_NE(fault.find(message), std::string::npos) << "got: " << fault; \
  } while (false)
