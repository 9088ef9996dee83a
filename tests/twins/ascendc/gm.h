// The global memory that a launch may access: the rows of its tensors, and nothing between the rows.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "chip.h"

namespace ngram_npu::twin {

// A failed check of the model. The fault ends the launch; its message is Outcome::fault.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string format_text(const char* format, ...) {
  char buffer[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof(buffer), format, args);
  va_end(args);
  return buffer;
}

// A tensor whose rows may be slices of a larger buffer. The bytes between the rows do not belong to the launch.
struct Region {
  const char* name;
  uintptr_t begin;
  uint64_t rows;  // number of rows
  uint64_t row_bytes;
  uint64_t pitch;  // distance of the rows' beginnings in bytes
  bool writable;

  uint64_t span() const { return rows == 0 ? 0 : (rows - 1) * pitch + row_bytes; }
  bool contains(uintptr_t address, uint64_t bytes) const {
    if (address < begin || address - begin >= span()) return false;
    const uint64_t offset = address - begin;
    return pitch == row_bytes ? offset + bytes <= span() : offset % pitch + bytes <= row_bytes;
  }
};

// The bytes of global memory that one instruction accessed.
struct Interval {
  uintptr_t begin;
  uintptr_t end;
  int32_t core;
  uint32_t tick;  // of the pipe that executed the instruction
};

// The accesses of one core to global memory. Adjacent accesses of the same tick are stored as one interval.
class AccessLog {
 public:
  std::vector<Interval> reads;    // by MTE2
  std::vector<Interval> loads;    // by S
  std::vector<Interval> writes;   // by MTE3
  std::vector<Interval> atomics;  // by MTE3 with an atomic operation

  static void add(std::vector<Interval>& list, uintptr_t address, uint64_t bytes, int32_t core, uint32_t tick) {
    if (!list.empty() && list.back().end == address && list.back().tick == tick) {
      list.back().end = address + bytes;
    } else {
      list.push_back({address, address + bytes, core, tick});
    }
  }
};

// Returns the largest number of copies of all cores that access the same 512-byte line.
uint64_t count_max_copies_per_line(const std::vector<AccessLog>& logs);

// Throws if two cores accessed the same bytes and one of the cores wrote: nothing orders the blocks of a launch. Only
// atomic operations may access the same bytes. No core of the launch, not even the one that made the atomic operation,
// may read their results.
void check_races(const std::vector<AccessLog>& logs);

// A line of a core's scalar data cache, which is coherent neither with the other cores' caches nor with copies.
struct ScalarLine {
  uint8_t data[kScalarLineBytes];
};

class GlobalMemory {
 public:
  explicit GlobalMemory(std::vector<Region> regions) : regions_(std::move(regions)) {}

  // Throws unless the bytes are inside a row of a tensor that the launch may read, or write if is_write.
  void check_access(uintptr_t address, uint64_t bytes, bool is_write, const char* call_name) const;
  // Loads the bytes of a line that belong to the launch, and leaves the others unchanged.
  void load_line(uintptr_t line, uint8_t* data) const;

 private:
  std::vector<Region> regions_;
};

}  // namespace ngram_npu::twin

#define NGRAM_TWIN_FAULT(...) throw ::ngram_npu::twin::Fault(::ngram_npu::twin::format_text(__VA_ARGS__))
#define NGRAM_TWIN_CHECK(condition, ...)             \
  do {                                               \
    if (!(condition)) NGRAM_TWIN_FAULT(__VA_ARGS__); \
  } while (false)
