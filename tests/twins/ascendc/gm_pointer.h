// A pointer into global memory that the kernels' scalars follow: every access through it is one of the core's, checked
// and counted as GlobalTensor's are. Included before all else by the kernels' build (core/common.h takes it for Gm).
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace ngram_npu::twin {

// The bytes as this block's scalar cache has them; a store lands there.
void scalar_load(const void* from, void* to, size_t bytes);
void scalar_store(void* to, const void* from, size_t bytes);

template <class T>
class GmPointer;

// What an index into it gives: read by conversion, written by assignment.
template <class T>
class GmReference {
 public:
  explicit GmReference(T* at) : at_(at) {}
  operator T() const {  // NOLINT: as a T& would
    T value;
    scalar_load(at_, &value, sizeof(T));
    return value;
  }
  const GmReference& operator=(T value) const {
    scalar_store(at_, &value, sizeof(T));
    return *this;
  }
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
  // As pointers convert: to const, and to void; all else by a cast.
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
