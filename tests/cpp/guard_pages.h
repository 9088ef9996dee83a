// Memory with an inaccessible page before and after every row, so that an access one element too far faults at once,
// also in vector code and without a sanitizer.
//
// A page is larger than most rows, so a row is next to one guard page only: at its end (Flush::kEnd) or at its start
// (Flush::kStart). A row whose bytes fill whole pages is next to two. Tests run with both values. Canaries fill the
// space between the row and its other guard page.
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
    const int64_t bytes = capacity * kItemBytes;
    data_bytes_ = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
    pitch_ = data_bytes_ + page_bytes();
    mapped_bytes_ = page_bytes() + rows * pitch_;
    void* memory = mmap(nullptr, static_cast<size_t>(mapped_bytes_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<uint8_t*>(memory);
    set_protection(PROT_READ | PROT_WRITE);
    for (int64_t r = 0; r < rows; ++r) std::fill_n(first_page(r), data_bytes_, kCanary);
  }

  GuardedRows(const GuardedRows&) = delete;
  GuardedRows& operator=(const GuardedRows&) = delete;
  ~GuardedRows() { munmap(base_, static_cast<size_t>(mapped_bytes_)); }

  int64_t capacity() const { return capacity_; }
  T* operator[](int64_t row) const { return reinterpret_cast<T*>(first_page(row) + row_offset()); }

  template <class View = T>
  TokenRows<View> view() const {
    return {(*this)[0], rows_, capacity_, pitch_ / kItemBytes};
  }

  // Makes writes fault.
  void forbid_writes() { set_protection(PROT_READ); }

  // Makes reads and writes fault.
  void forbid_reads() { set_protection(PROT_NONE); }

  // Returns false if the space between a row and its other guard was written.
  bool is_intact() const {
    const auto is_canary = [](uint8_t byte) { return byte == kCanary; };
    for (int64_t r = 0; r < rows_; ++r) {
      const uint8_t* const page = first_page(r);
      if (!std::all_of(page, page + row_offset(), is_canary)) return false;
      if (!std::all_of(page + row_offset() + capacity_ * kItemBytes, page + data_bytes_, is_canary)) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kItemBytes = static_cast<int64_t>(sizeof(T));
  static constexpr uint8_t kCanary = 0xA5;

  static int64_t page_bytes() {
    static const int64_t bytes = sysconf(_SC_PAGESIZE);
    return bytes;
  }

  uint8_t* first_page(int64_t row) const { return base_ + page_bytes() + row * pitch_; }
  int64_t row_offset() const { return flush_ == Flush::kEnd ? data_bytes_ - capacity_ * kItemBytes : 0; }

  void set_protection(int protection) {
    for (int64_t r = 0; r < rows_ && data_bytes_ > 0; ++r) {
      if (mprotect(first_page(r), static_cast<size_t>(data_bytes_), protection) != 0) throw std::bad_alloc();
    }
  }

  const int64_t rows_, capacity_;
  const Flush flush_;
  int64_t data_bytes_, pitch_, mapped_bytes_;  // data_bytes_: a row, rounded up to whole pages; pitch_: in bytes
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
