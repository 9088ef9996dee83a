// Memory with an inaccessible page before and after every row, so that an access one element too far faults at once,
// also in vector code and without a sanitizer.
//
// A page is larger than most rows, so a row touches one guard: at its end, or in the second mode at its start (both, if
// its bytes fill whole pages). Tests run in both modes. Canaries fill the space between the row and its other guard.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

#include "core/common.h"

namespace ngram_npu::test {

enum class Flush { kEnd, kStart };
constexpr Flush kFlushes[] = {Flush::kEnd, Flush::kStart};

// Rows of `capacity` items, with a guard page before and after each row.
template <class T>
class GuardedRows {
 public:
  GuardedRows(int64_t rows, int64_t capacity, Flush flush) : rows_(rows), capacity_(capacity), flush_(flush) {
    const int64_t bytes = capacity * item;
    data_bytes_ = (bytes + page() - 1) / page() * page();
    pitch_ = data_bytes_ + page();
    mapped_ = page() + rows * pitch_;
    void* at = mmap(nullptr, static_cast<size_t>(mapped_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(at);
    allow(PROT_READ | PROT_WRITE);
    for (int64_t r = 0; r < rows; ++r) std::fill_n(pages(r), data_bytes_, kCanary);
  }

  GuardedRows(const GuardedRows&) = delete;
  GuardedRows& operator=(const GuardedRows&) = delete;
  ~GuardedRows() { munmap(base_, static_cast<size_t>(mapped_)); }

  int64_t capacity() const { return capacity_; }
  T* operator[](int64_t row) const { return reinterpret_cast<T*>(pages(row) + offset()); }

  template <class View = T>
  TokenRows<View> view() const {
    return {(*this)[0], rows_, capacity_, pitch_ / item};
  }

  // Makes writes fault.
  void forbid_writes() { allow(PROT_READ); }

  // Makes reads and writes fault.
  void forbid_reads() { allow(PROT_NONE); }

  // Returns false if the space between a row and its other guard was written.
  bool is_intact() const {
    const auto canary = [](uint8_t byte) { return byte == kCanary; };
    for (int64_t r = 0; r < rows_; ++r) {
      const uint8_t* const at = pages(r);
      if (!std::all_of(at, at + offset(), canary)) return false;
      if (!std::all_of(at + offset() + capacity_ * item, at + data_bytes_, canary)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t item = static_cast<int64_t>(sizeof(T));
  static constexpr uint8_t kCanary = 0xA5;

  static int64_t page() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
  }

  uint8_t* pages(int64_t row) const { return base_ + page() + row * pitch_; }
  int64_t offset() const { return flush_ == Flush::kEnd ? data_bytes_ - capacity_ * item : 0; }

  void allow(int protection) {
    for (int64_t r = 0; r < rows_ && data_bytes_ > 0; ++r) {
      if (mprotect(pages(r), static_cast<size_t>(data_bytes_), protection) != 0) throw std::bad_alloc();
    }
  }

  const int64_t rows_, capacity_;
  const Flush flush_;
  int64_t data_bytes_, pitch_, mapped_;  // data_bytes_: size of a row, rounded up to whole pages
  uint8_t* base_;
};

// One array between guard pages. An empty array points to a guard page.
template <class T>
class Guarded {
 public:
  Guarded(int64_t size, Flush flush) : memory_(1, size, flush) {}
  Guarded(const std::vector<T>& values, Flush flush) : Guarded(static_cast<int64_t>(values.size()), flush) {
    std::copy(values.begin(), values.end(), data());
  }

  T* data() const { return memory_[0]; }
  int64_t size() const { return memory_.capacity(); }
  std::vector<T> values() const { return std::vector<T>(data(), data() + size()); }
  void forbid_writes() { memory_.forbid_writes(); }
  bool is_intact() const { return memory_.is_intact(); }

 private:
  GuardedRows<T> memory_;
};

}  // namespace ngram_npu::test
