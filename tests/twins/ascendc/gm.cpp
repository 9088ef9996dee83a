#include "gm.h"

#include <algorithm>
#include <unordered_map>

#include "fault.h"

namespace ngram_npu::twin {

void GlobalMemory::check(uintptr_t at, uint64_t bytes, bool write, const char* what) const {
  const Region* near = nullptr;
  for (const Region& region : regions_) {
    if (region.holds(at, bytes)) {
      NGRAM_TWIN_CHECK(!write || region.writable, "%s: writes to %s, which the launch may only read", what,
                       region.name);
      return;
    }
    if (at + bytes > region.begin && at < region.begin + region.span()) near = &region;
  }
  if (near == nullptr) {
    NGRAM_TWIN_FAULT("%s: %s of %llu bytes of global memory at %p, outside every tensor of the launch", what,
                     write ? "write" : "read", static_cast<unsigned long long>(bytes), reinterpret_cast<void*>(at));
  }
  NGRAM_TWIN_FAULT("%s: %s of bytes [%lld, %lld) of %s (%llu rows of %llu bytes, %llu apart) leaves its rows", what,
                   write ? "write" : "read", static_cast<long long>(at) - static_cast<long long>(near->begin),
                   static_cast<long long>(at + bytes) - static_cast<long long>(near->begin), near->name,
                   static_cast<unsigned long long>(near->rows), static_cast<unsigned long long>(near->row_bytes),
                   static_cast<unsigned long long>(near->pitch));
}

void GlobalMemory::load_line(uintptr_t line, uint8_t* data) const {
  for (const Region& region : regions_) {
    if (region.span() == 0 || line + kScalarLine <= region.begin || line >= region.begin + region.span()) continue;
    for (uint64_t i = 0; i < kScalarLine; ++i)
      if (region.holds(line + i, 1)) data[i] = *reinterpret_cast<const uint8_t*>(line + i);
  }
}

namespace {

void collect(std::vector<AccessLog>& logs, std::vector<Interval> AccessLog::* list, std::vector<Interval>& all) {
  all.clear();
  for (AccessLog& log : logs) all.insert(all.end(), (log.*list).begin(), (log.*list).end());
  std::sort(all.begin(), all.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
}

// Compares every interval of `a` with every interval of `b` that overlaps it and belongs to another core. Both sorted.
void check_pairs(const std::vector<Interval>& a, const std::vector<Interval>& b, const char* what) {
  // For each interval of b, the furthest end so far: it tells a search where to stop.
  std::vector<uintptr_t> reach(b.size());
  uintptr_t furthest = 0;
  for (size_t i = 0; i < b.size(); ++i) reach[i] = furthest = std::max(furthest, b[i].end);
  for (const Interval& x : a) {
    const auto past = std::partition_point(b.begin(), b.end(), [&](const Interval& y) { return y.begin < x.end; });
    for (size_t i = static_cast<size_t>(past - b.begin()); i-- > 0 && reach[i] > x.begin;) {
      const Interval& y = b[i];
      NGRAM_TWIN_CHECK(y.end <= x.begin || y.core == x.core, "blocks %d and %d: %s, at %p of global memory", x.core,
                       y.core, what, reinterpret_cast<void*>(std::max(x.begin, y.begin)));
    }
  }
}

}  // namespace

uint64_t copies_at_one_line(const std::vector<AccessLog>& logs) {
  constexpr uintptr_t kLine = 512;
  std::unordered_map<uintptr_t, uint64_t> copies;
  uint64_t most = 0;
  for (const AccessLog& log : logs) {
    for (const auto* list : {&log.reads, &log.writes}) {
      for (const Interval& x : *list) {
        for (uintptr_t line = x.begin / kLine; line * kLine < x.end; ++line) most = std::max(most, ++copies[line]);
      }
    }
  }
  return most;
}

void check_races(std::vector<AccessLog>& logs) {
  std::vector<Interval> writes;
  std::vector<Interval> reads;
  collect(logs, &AccessLog::writes, writes);
  check_pairs(writes, writes, "both write the same bytes");
  for (const auto list : {&AccessLog::reads, &AccessLog::loads}) {
    collect(logs, list, reads);
    check_pairs(writes, reads, "one writes what the other reads");
  }
}

}  // namespace ngram_npu::twin
