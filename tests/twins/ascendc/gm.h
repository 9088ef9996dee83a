// Global memory as a launch sees it: the launch's tensors, and nothing between them.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include "chip.h"

namespace ngram_npu::twin {

// A failed check of the model. It ends the launch, which returns a status and keeps the message.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
  char buffer[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof(buffer), format, args);
  va_end(args);
  return buffer;
}

// `rows` runs of `row_bytes`, `pitch` apart: a tensor with rows that may be slices of a larger buffer. The gaps between
// rows do not belong to the launch.
struct Region {
  const char* name;
  uintptr_t begin;
  uint64_t rows;
  uint64_t row_bytes;
  uint64_t pitch;
  bool writable;

  uint64_t span() const { return rows == 0 ? 0 : (rows - 1) * pitch + row_bytes; }
  bool holds(uintptr_t at, uint64_t bytes) const {
    if (at < begin || at - begin >= span()) return false;
    const uint64_t offset = at - begin;
    return pitch == row_bytes ? offset + bytes <= span() : offset % pitch + bytes <= row_bytes;
  }
};

struct Interval {
  uintptr_t begin;
  uintptr_t end;
  int32_t core;
  uint32_t tick;  // of the pipe that made it
};

// What one core did to global memory. Neighbouring accesses of one tick are kept as one.
class AccessLog {
 public:
  std::vector<Interval> reads;   // by MTE2
  std::vector<Interval> loads;   // by S
  std::vector<Interval> writes;  // by MTE3

  static void add(std::vector<Interval>& to, uintptr_t at, uint64_t bytes, int32_t core, uint32_t tick) {
    if (!to.empty() && to.back().end == at && to.back().tick == tick) {
      to.back().end = at + bytes;
    } else {
      to.push_back({at, at + bytes, core, tick});
    }
  }
};

// The largest number of copies, over all cores, at one 512-byte line.
uint64_t copies_at_one_line(const std::vector<AccessLog>& logs);

// Throws if two cores touched the same bytes and one of them wrote: nothing orders the blocks of a launch.
void check_races(std::vector<AccessLog>& logs);

// A core's scalar data cache: 64-byte lines, coherent neither with the other cores' caches nor with DMA.
struct ScalarLine {
  uint8_t data[kScalarLine];
};

class GlobalMemory {
 public:
  explicit GlobalMemory(std::vector<Region> regions) : regions_(std::move(regions)) {}

  void check(uintptr_t at, uint64_t bytes, bool write, const char* what) const;
  // Loads those bytes of a line that belong to the launch.
  void load_line(uintptr_t line, uint8_t* data) const;

 private:
  std::vector<Region> regions_;
};

}  // namespace ngram_npu::twin

#define NGRAM_TWIN_FAULT(...) throw ::ngram_npu::twin::Fault(::ngram_npu::twin::text(__VA_ARGS__))
#define NGRAM_TWIN_CHECK(condition, ...)             \
  do {                                               \
    if (!(condition)) NGRAM_TWIN_FAULT(__VA_ARGS__); \
  } while (false)
