// A pointer into global memory for the kernels' scalar code. The core checks and counts every access through it. The
// kernels' build includes this file first (core/common.h uses it as Gm).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ngram_npu::twin {

// Reads go through this block's scalar cache. A write is a fault: it would stay there, and its line overwrites others.
void scalar_load(const void* from, void* to, size_t bytes);
[[noreturn]] void scalar_store(void* to);

template <class T>
class GmPointer;

// The result of indexing: read by conversion; assignment is a fault.
template <class T>
class GmReference {
 public:
  explicit GmReference(T* at) : at_(at) {}
  operator T() const {  // NOLINT: as a T& would
    T value;
    scalar_load(at_, &value, sizeof(T));
    return value;
  }
  const GmReference& operator=(T) const { scalar_store(at_); }
  GmReference(const GmReference&) = default;
  const GmReference& operator=(const GmReference& other) const { return *this = static_cast<T>(other); }

 private:
  T* at_;
};

template <class T>
class GmPointer {  // trivial, and of a pointer's bytes
 public:
  GmPointer() = default;
  GmPointer(std::nullptr_t) : at_(nullptr) {}  // NOLINT
  explicit GmPointer(T* at) : at_(at) {}
  explicit GmPointer(uint64_t address) : at_(reinterpret_cast<T*>(address)) {}
  // Converts as a pointer does: implicitly to const and to void, otherwise by a cast.
  template <class U, std::enable_if_t<std::is_convertible_v<U*, T*>, int> = 0>
  GmPointer(GmPointer<U> other) : at_(other.raw()) {}  // NOLINT
  template <class U, std::enable_if_t<!std::is_convertible_v<U*, T*>, int> = 0>
  explicit GmPointer(GmPointer<U> other) : at_((T*)other.raw()) {}  // NOLINT

  template <class V = T>
  auto operator[](int64_t i) const {
    if constexpr (std::is_const_v<V>) {
      std::remove_const_t<V> value;
      scalar_load(at_ + i, &value, sizeof(V));
      return value;
    } else {
      return GmReference<V>(at_ + i);
    }
  }
  template <class V = T>
  auto operator*() const {
    return (*this)[0];
  }
  template <class V = T>
  GmPointer operator+(int64_t i) const {
    return GmPointer(static_cast<V*>(at_) + i);
  }

  friend bool operator==(GmPointer a, std::nullptr_t) { return a.at_ == nullptr; }
  friend bool operator!=(GmPointer a, std::nullptr_t) { return a.at_ != nullptr; }

  T* raw() const { return at_; }

 private:
  T* at_;
};
static_assert(std::is_trivial_v<GmPointer<int>> && sizeof(GmPointer<int>) == sizeof(int*));

}  // namespace ngram_npu::twin

#define NGRAM_NPU_GM_POINTER ::ngram_npu::twin::GmPointer
