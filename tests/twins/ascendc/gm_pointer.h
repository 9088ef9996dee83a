// A pointer into global memory for the kernels' scalar code. The simulated core checks and counts every access through
// the pointer. The build of the kernels includes this file first, so that core/common.h uses GmPointer as Gm.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ngram_npu::twin {

// Loads through the scalar cache of the running block's core.
void load_scalar(const void* from, void* to, size_t bytes);
// Throws a Fault: a store would stay in the cache, and writing back its line would overwrite bytes of other cores.
[[noreturn]] void fail_scalar_store(void* to);

template <class T>
class GmPointer;

// The result of indexing a GmPointer. Converting the reference to T loads the value; assignment is a fault.
template <class T>
class GmReference {
 public:
  explicit GmReference(T* address) : address_(address) {}
  operator T() const {  // NOLINT: implicit, as for a T&
    T value;
    load_scalar(address_, &value, sizeof(T));
    return value;
  }
  const GmReference& operator=(T) const { fail_scalar_store(address_); }
  GmReference(const GmReference&) = default;
  const GmReference& operator=(const GmReference& other) const { return *this = static_cast<T>(other); }

 private:
  T* address_;
};

template <class T>
class GmPointer {  // trivial, with the size of a pointer
 public:
  GmPointer() = default;
  GmPointer(std::nullptr_t) : address_(nullptr) {}  // NOLINT
  explicit GmPointer(T* address) : address_(address) {}
  explicit GmPointer(uint64_t address) : address_(reinterpret_cast<T*>(address)) {}
  // Converts like a built-in pointer: implicitly to a pointer to const or to void, otherwise by a cast.
  template <class U, std::enable_if_t<std::is_convertible_v<U*, T*>, int> = 0>
  GmPointer(GmPointer<U> other) : address_(other.raw()) {}  // NOLINT
  template <class U, std::enable_if_t<!std::is_convertible_v<U*, T*>, int> = 0>
  explicit GmPointer(GmPointer<U> other) : address_((T*)other.raw()) {}  // NOLINT

  template <class V = T>
  auto operator[](int64_t i) const {
    if constexpr (std::is_const_v<V>) {
      std::remove_const_t<V> value;
      load_scalar(address_ + i, &value, sizeof(V));
      return value;
    } else {
      return GmReference<V>(address_ + i);
    }
  }
  template <class V = T>
  auto operator*() const {
    return (*this)[0];
  }
  template <class V = T>
  GmPointer operator+(int64_t i) const {
    return GmPointer(static_cast<V*>(address_) + i);
  }

  friend bool operator==(GmPointer a, std::nullptr_t) { return a.address_ == nullptr; }
  friend bool operator!=(GmPointer a, std::nullptr_t) { return a.address_ != nullptr; }

  T* raw() const { return address_; }

 private:
  T* address_;
};
static_assert(std::is_trivial_v<GmPointer<int>> && sizeof(GmPointer<int>) == sizeof(int*));

}  // namespace ngram_npu::twin

#define NGRAM_NPU_GM_POINTER ::ngram_npu::twin::GmPointer
