// LocalTensor and GlobalTensor, as far as the kernels use them.
#pragma once

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
    ++core.cost.scalar_ub;
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

}  // namespace AscendC
