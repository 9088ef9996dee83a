// Helpers for tests of the model. EXPECT_FAULT runs a kernel with a fault, EXPECT_CLEAN a correct kernel.
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
using InputQueue = TQue<TPosition::VECIN, 2>;

// A tensor in global memory, with the host memory that contains it.
template <class T>
class Tensor {
 public:
  explicit Tensor(size_t size, T value = T{}) : values(size, value) {}
  Region region(bool writable = true) {
    return {
        "tensor", reinterpret_cast<uintptr_t>(values.data()), 1, values.size() * sizeof(T), values.size() * sizeof(T),
        writable};
  }
  // Returns the tensor from element `first`, which may lie outside of the tensor.
  GlobalTensor<T> global(uint64_t first = 0) {
    GlobalTensor<T> tensor;
    tensor.SetGlobalBuffer(GmPointer<T>(uint64_t{reinterpret_cast<uintptr_t>(values.data())} + first * sizeof(T)), 0);
    return tensor;
  }
  // Returns a pointer for scalar accesses.
  GmPointer<T> pointer() { return GmPointer<T>(values.data()); }
  std::vector<T> values;
};

// Runs a launch and returns the message of its fault; empty if there is none.
inline std::string run_and_get_fault(const std::function<void()>& kernel, const std::vector<Region>& regions = {},
                                     int32_t num_blocks = 1) {
  return run(regions, num_blocks, kernel, Options()).fault;
}

template <HardEvent event>
void sync_pipes() {
  const int32_t id = GetTPipePtr()->FetchEventID(event);
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// Makes all pipes wait until the instructions that were issued before are complete.
inline void sync_all_pipes() {
  sync_pipes<HardEvent::V_S>();
  sync_pipes<HardEvent::MTE2_S>();
  sync_pipes<HardEvent::MTE3_S>();
  sync_pipes<HardEvent::S_V>();
  sync_pipes<HardEvent::S_MTE2>();
  sync_pipes<HardEvent::S_MTE3>();
}

template <class T>
T read_element(const LocalTensor<T>& tensor, uint32_t i) {
  sync_all_pipes();
  return tensor.GetValue(i);
}

template <class T>
AscendC::DataCopyExtParams make_copy_params(uint32_t count) {
  return {1, static_cast<uint32_t>(count * sizeof(T)), 0, 0, 0};
}
template <class T>
void copy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count) {
  AscendC::DataCopyPad(dst, src, make_copy_params<T>(count), AscendC::DataCopyPadExtParams<T>());
}
template <class T>
void copy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count) {
  AscendC::DataCopyPad(dst, src, make_copy_params<T>(count));
}

// Fills a tensor with ones, or with zeros if Duplicate does not support the type.
template <class T>
void initialize(const LocalTensor<T>& tensor, uint32_t len) {
  if constexpr (is_offered<T>(Call::kDuplicate)) {
    AscendC::Duplicate(tensor, T(1), static_cast<int32_t>(len));
  } else {
    AscendC::Duplicate(tensor.template ReinterpretCast<uint16_t>(), uint16_t{0},
                       static_cast<int32_t>(len * sizeof(T) / 2));
  }
}

// A tensor of `len` elements, and the TPipe that owns its buffer. The elements are poison if `initialized` is false.
template <class T>
struct Scratch {
  explicit Scratch(uint32_t len, bool initialized = true) : tensor(allocate<T>(len, initialized)) {}
  template <class U>
  LocalTensor<U> allocate(uint32_t len, bool initialized = true) {
    TBuf<TPosition::VECIN> buffer;
    pipe.InitBuffer(buffer, static_cast<uint32_t>(len * sizeof(U)));
    LocalTensor<U> allocated = buffer.template Get<U>();
    if (initialized) initialize(allocated, len);
    sync_all_pipes();
    return allocated;
  }
  TPipe pipe;
  LocalTensor<T> tensor;
};

// Returns a kernel that calls `function` with a Scratch of 64 elements.
template <class T, class Function>
std::function<void()> make_scratch_kernel(const Function& function, bool initialized = true) {
  return [=] {
    Scratch<T> s(64, initialized);
    function(s);
  };
}

}  // namespace ngram_npu::twin

#define EXPECT_CLEAN(...) EXPECT_EQ(::ngram_npu::twin::run_and_get_fault(__VA_ARGS__), "")
#define EXPECT_FAULT(message, ...)                                               \
  do {                                                                           \
    const std::string fault = ::ngram_npu::twin::run_and_get_fault(__VA_ARGS__); \
    EXPECT_NE(fault.find(message), std::string::npos) << "got: " << fault;       \
  } while (false)
