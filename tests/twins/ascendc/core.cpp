#include "core.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_map>

namespace ngram_npu::twin {

Core::Core() : ub_(kChip.ub_bytes), shadow_(kChip.ub_bytes) {
  for (int p = 0; p < kNumPipes; ++p) {
    write_ticks_[p].resize(kNumUbBlocks);
    read_ticks_[p].resize(kNumUbBlocks);
  }
  num_allocated_bytes_ = kChip.ub_bytes;  // so that the first begin_block() clears all of UB
}

Core*& Core::current_pointer() {
  static thread_local Core* core = nullptr;
  return core;
}

void load_scalar(const void* from, void* to, size_t bytes) {
  std::memcpy(to, Core::current().load_gm_scalar(reinterpret_cast<uintptr_t>(from), bytes), bytes);
}

void fail_scalar_store(void* to) {
  NGRAM_TWIN_FAULT("block %d: a scalar store to global memory at %p", Core::current().block(), to);
}

void Core::begin_block(const GlobalMemory* gm, int32_t block, uint32_t ub_bytes, const CostModel& model,
                       bool races_allowed) {
  std::fill_n(ub_.begin(), num_allocated_bytes_, uint8_t{0xA5});
  std::fill_n(shadow_.begin(), num_allocated_bytes_, uint8_t{0xFF});
  for (int p = 0; p < kNumPipes; ++p) {
    std::fill_n(write_ticks_[p].begin(), num_allocated_bytes_ / kBlockBytes, 0u);
    std::fill_n(read_ticks_[p].begin(), num_allocated_bytes_ / kBlockBytes, 0u);
  }
  num_allocated_bytes_ = 0;
  buffers_.clear();
  gm_ = gm;
  log_ = AccessLog();
  cache_.clear();
  for (uint32_t* ticks : {ticks_, last_write_ticks_, last_read_ticks_}) std::fill_n(ticks, kNumPipes, 0u);
  std::fill_n(&complete_ticks_[0][0], kNumPipes * kNumPipes, 0u);
  for (auto& flags : flags_) std::fill(std::begin(flags), std::end(flags), Flag());
  std::fill_n(used_event_ids_, kNumEvents, uint8_t{0});
  atomic_dtype_ = kNoType;
  unreserved_flag_ = nullptr;
  model_ = model;
  std::fill_n(times_, kNumPipes, 0.0);
  cost = Cost();
  block_ = block;
  ub_bytes_ = ub_bytes;
  races_allowed_ = races_allowed;
  num_tpipes_ = 0;
  num_instructions_ = 0;
}

void Core::end_block(AccessLog& log, Cost& total) {
  for (int e = 0; e < kNumEvents; ++e) {
    for (int id = 0; id < 8; ++id) {
      NGRAM_TWIN_CHECK(!flags_[e][id].is_set, "block %d: flag %s_%s %d is set and never waited for", block_,
                       kPipeNames[e / kNumPipes], kPipeNames[e % kNumPipes], id);
    }
  }
  NGRAM_TWIN_CHECK(atomic_dtype_ == kNoType, "block %d: SetAtomicMax without SetAtomicNone", block_);
  cost[kCycles] = *std::max_element(times_, times_ + kNumPipes);
  log = std::move(log_);
  total = cost;
}

int32_t Core::new_buffer(uint32_t bytes) {
  const uint32_t rounded = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  NGRAM_TWIN_CHECK(bytes > 0, "InitBuffer: a length of 0");
  const uint32_t budget = ub_bytes_ - kChip.ub_reserved_bytes;
  NGRAM_TWIN_CHECK(rounded <= budget && num_allocated_bytes_ <= budget - rounded,
                   "InitBuffer: %u more bytes after %u leave the %u bytes of UB", rounded, num_allocated_bytes_,
                   budget);
  NGRAM_TWIN_CHECK(buffers_.size() < kMaxBuffers, "InitBuffer: more than %d buffers", kMaxBuffers);
  Buffer new_buffer;
  new_buffer.begin = num_allocated_bytes_;
  new_buffer.bytes = rounded;
  num_allocated_bytes_ += rounded;
  buffers_.push_back(new_buffer);
  return static_cast<int32_t>(buffers_.size()) - 1;
}

TensorLocation Core::allocate(int32_t index) {
  Buffer& b = buffer(index);
  b.state = BufferState::kAllocated;
  ++b.generation;
  std::fill_n(shadow_.begin() + b.begin, b.bytes, uint8_t{0xFF});
  return locate(index);
}

void Core::release(int32_t index) {
  Buffer& b = buffer(index);
  b.state = BufferState::kFree;
  ++b.generation;
}

Buffer& Core::get_live_buffer(const TensorLocation& location, const char* call_name) {
  NGRAM_TWIN_CHECK(location.buffer >= 0, "block %d: %s: a tensor without a buffer", block_, call_name);
  Buffer& b = buffer(location.buffer);
  NGRAM_TWIN_CHECK(b.generation == location.generation, "block %d: %s: a tensor that was freed or is in the queue",
                   block_, call_name);
  return b;
}

void Core::wait_for_release(int32_t index) {
  auto& flag = buffer(index).release_flag;
  if (flag.event < 0) return;
  wait_flag(flag.event, flag.id);
  release_event(flag.event, flag.id);
  flag.event = -1;
}

void Core::finish_tpipe() {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& b = buffers_[i];
    NGRAM_TWIN_CHECK(!b.was_allocated || b.state == BufferState::kFree, "block %d: a tensor of a queue is never freed",
                     block_);
    wait_for_release(static_cast<int32_t>(i));
  }
}

void Core::issue(Pipe pipe, const char* call_name) {
  constexpr uint64_t kMaxInstructions = 20'000'000;  // fifty times the number for the largest batch of the tests
  NGRAM_TWIN_CHECK(++num_instructions_ < kMaxInstructions, "block %d: %s: the kernel does not seem to end", block_,
                   call_name);
  NGRAM_TWIN_CHECK(unreserved_flag_ == nullptr,
                   "block %d: %s: between SetFlag and WaitFlag of an ID that is not allocated: FetchEventID does not "
                   "reserve IDs",
                   block_, call_name);
  pipe_ = pipe;
  call_name_ = call_name;
  if (pipe == kS) {
    complete_ticks_[kS][kS] = ++ticks_[kS];
    return;
  }
  times_[kS] += model_.issue;
  times_[pipe] = std::max(times_[pipe], times_[kS]);
  // The instruction begins after all instructions that S has waited for. Accesses of S itself may still be incomplete.
  for (int q = 1; q < kNumPipes; ++q)
    complete_ticks_[pipe][q] = std::max(complete_ticks_[pipe][q], complete_ticks_[kS][q]);
  complete_ticks_[pipe][pipe] = ++ticks_[pipe];
}

uint8_t* Core::access_ub(const TensorLocation& location, uint64_t bytes, uint32_t align, bool is_write) {
  const Buffer& b = get_live_buffer(location, call_name_);
  NGRAM_TWIN_CHECK(location.address % align == 0, "block %d: %s: operand at UB byte %u, not aligned to %u bytes",
                   block_, call_name_, location.address, align);
  NGRAM_TWIN_CHECK(location.address >= b.begin && location.address + bytes <= b.begin + b.bytes,
                   "block %d: %s: %s of bytes [%lld, %lld) of a tensor of %u bytes", block_, call_name_,
                   is_write ? "write" : "read", static_cast<long long>(location.address) - b.begin,
                   static_cast<long long>(location.address + bytes) - b.begin, b.bytes);
  check_ub_order(location.address, bytes, is_write);
  return ub_.data() + location.address;
}

void Core::check_ub_order(uint32_t address, uint64_t bytes, bool is_write) {
  if (bytes == 0) return;
  const uint32_t first = address / kBlockBytes;
  const uint32_t last = static_cast<uint32_t>((address + bytes - 1) / kBlockBytes);
  const auto get_latest_tick = [&](const std::vector<uint32_t>& ticks) {
    uint32_t latest = 0;
    for (uint32_t i = first; i <= last; ++i) latest = std::max(latest, ticks[i]);
    return latest;
  };
  for (int q = 0; q < kNumPipes; ++q) {
    const uint32_t complete_tick = complete_ticks_[pipe_][q];
    const bool may_write = last_write_ticks_[q] > complete_tick;
    const bool may_read = is_write && last_read_ticks_[q] > complete_tick;
    if (q == pipe_ || !(may_write || may_read)) continue;
    const uint32_t write_tick = may_write ? get_latest_tick(write_ticks_[q]) : 0;
    const uint32_t read_tick = may_read ? get_latest_tick(read_ticks_[q]) : 0;
    NGRAM_TWIN_CHECK(write_tick <= complete_tick,
                     "block %d: %s on pipe %s %s what pipe %s wrote, and nothing orders the accesses", block_,
                     call_name_, kPipeNames[pipe_], is_write ? "overwrites" : "reads", kPipeNames[q]);
    NGRAM_TWIN_CHECK(read_tick <= complete_tick,
                     "block %d: %s on pipe %s overwrites what pipe %s reads, and nothing orders the accesses", block_,
                     call_name_, kPipeNames[pipe_], kPipeNames[q]);
  }
  (is_write ? last_write_ticks_ : last_read_ticks_)[pipe_] = ticks_[pipe_];
  std::vector<uint32_t>& ticks = is_write ? write_ticks_[pipe_] : read_ticks_[pipe_];
  std::fill(ticks.begin() + first, ticks.begin() + last + 1, ticks_[pipe_]);
}

void Core::add_cycles(double cycles) { times_[pipe_] += cycles; }

void Core::add_vector_cost(uint64_t bytes, Speed speed) {
  const uint64_t repeats = (bytes + kRepeatBytes - 1) / kRepeatBytes;
  ++cost[kVectorInstructions];
  cost[kVectorRepeats] += static_cast<double>(repeats);
  add_cycles(model_.vector_startup +
             static_cast<double>(repeats) * (speed == Speed::kGather ? model_.gather_repeat : model_.vector_repeat));
}

void Core::add_copy_cost(uint64_t bytes, bool to_gm) {
  ++cost[kCopies];
  cost[to_gm ? kUbToGmBytes : kGmToUbBytes] += static_cast<double>(bytes);
  add_cycles(static_cast<double>(bytes) / model_.copy_bytes_per_cycle);
}

// Throws if the present instruction accesses memory that list_pipe may still be accessing. The list's ticks ascend.
void Core::check_gm_order(const std::vector<Interval>& list, Pipe list_pipe, uintptr_t address, uint64_t bytes,
                          const char* list_access) {
  for (size_t i = list.size(); !races_allowed_ && i-- > 0 && list[i].tick > complete_ticks_[pipe_][list_pipe];) {
    NGRAM_TWIN_CHECK(list[i].end <= address || list[i].begin >= address + bytes,
                     "block %d: %s on pipe %s accesses global memory that pipe %s, and nothing orders the accesses",
                     block_, call_name_, kPipeNames[pipe_], list_access);
  }
}

void Core::record_gm_copy(uintptr_t address, uint64_t bytes, CopyKind kind) {
  gm_->check_access(address, bytes, kind != CopyKind::kRead, call_name_);
  if (kind != CopyKind::kRead) {
    check_gm_order(log_.reads, kMte2, address, bytes, "MTE2 still reads");
    check_gm_order(log_.loads, kS, address, bytes, "S still reads");
  } else {
    check_gm_order(log_.writes, kMte3, address, bytes, "MTE3 still writes");
    check_gm_order(log_.atomics, kMte3, address, bytes, "MTE3 still writes");
  }
  auto& list = kind == CopyKind::kRead ? log_.reads : kind == CopyKind::kWrite ? log_.writes : log_.atomics;
  AccessLog::add(list, address, bytes, block_, ticks_[pipe_]);
}

ScalarLine& Core::find_cached_line(uintptr_t line) {
  ++cost[kScalarGm];
  const auto [entry, is_miss] = cache_.try_emplace(line);
  if (is_miss) {
    gm_->load_line(line, entry->second.data);
    ++cost[kScalarGmMisses];
  }
  times_[kS] += is_miss ? model_.scalar_gm_miss : model_.scalar_gm;
  return entry->second;
}

const uint8_t* Core::load_gm_scalar(uintptr_t address, uint64_t bytes) {
  issue(kS, "a scalar load");
  gm_->check_access(address, bytes, false, call_name_);
  NGRAM_TWIN_CHECK(address % bytes == 0, "block %d: %s: not aligned", block_, call_name_);
  check_gm_order(log_.writes, kMte3, address, bytes, "MTE3 still writes");
  check_gm_order(log_.atomics, kMte3, address, bytes, "MTE3 still writes");
  const uintptr_t line = address / kScalarLineBytes * kScalarLineBytes;
  ScalarLine& cached = find_cached_line(line);
  const bool is_stale = std::memcmp(cached.data + (address - line), reinterpret_cast<void*>(address), bytes) != 0;
  NGRAM_TWIN_CHECK(races_allowed_ || !is_stale,
                   "block %d: %s: the scalar cache holds an old copy of global memory that has changed since", block_,
                   call_name_);
  // A cache may evict a line at any time, so a load returns either the old copy or the present bytes.
  if (is_stale && num_instructions_ % 2 == 0) gm_->load_line(line, cached.data);
  AccessLog::add(log_.loads, address, bytes, block_, ticks_[kS]);
  return cached.data + (address - line);
}

int Core::fetch_event(int event) const {
  for (int id = 0; id < kNumEventIds; ++id)
    if ((used_event_ids_[event] >> id & 1) == 0) return id;
  NGRAM_TWIN_FAULT("block %d: no event ID left of %s_%s: all %d are taken", block_, kPipeNames[event / kNumPipes],
                   kPipeNames[event % kNumPipes], kNumEventIds);
}

int Core::alloc_event(int event) {
  const int id = fetch_event(event);
  used_event_ids_[event] = static_cast<uint8_t>(used_event_ids_[event] | 1 << id);
  return id;
}

void Core::release_event(int event, int id) {
  used_event_ids_[event] = static_cast<uint8_t>(used_event_ids_[event] & ~(1 << id));
}

void Core::check_and_release_event(int event, int id) {
  NGRAM_TWIN_CHECK(id >= 0 && id < kNumEventIds && (used_event_ids_[event] >> id & 1) != 0,
                   "block %d: ReleaseEventID<%s_%s>(%d): not allocated", block_, kPipeNames[event / kNumPipes],
                   kPipeNames[event % kNumPipes], id);
  NGRAM_TWIN_CHECK(!flags_[event][id].is_set, "block %d: ReleaseEventID<%s_%s>(%d): set, and not waited for", block_,
                   kPipeNames[event / kNumPipes], kPipeNames[event % kNumPipes], id);
  release_event(event, id);
}

void Core::set_flag(int event, int id) {
  NGRAM_TWIN_CHECK(id >= 0 && id < kNumEventIds, "block %d: SetFlag<%s_%s>(%d): the IDs are 0 to %d", block_,
                   kPipeNames[event / kNumPipes], kPipeNames[event % kNumPipes], id, kNumEventIds - 1);
  Flag& flag = flags_[event][id];
  NGRAM_TWIN_CHECK(!flag.is_set, "block %d: SetFlag<%s_%s>(%d): set already, and not waited for", block_,
                   kPipeNames[event / kNumPipes], kPipeNames[event % kNumPipes], id);
  ++cost[kSyncs];
  const auto pipe = static_cast<Pipe>(event / kNumPipes);
  issue(pipe, "SetFlag");
  if ((used_event_ids_[event] >> id & 1) == 0) unreserved_flag_ = &flag;
  flag.is_set = true;
  std::copy_n(complete_ticks_[pipe], static_cast<size_t>(kNumPipes), flag.complete_ticks);
  flag.time = times_[pipe] + model_.sync + (pipe == kMte2 || pipe == kMte3 ? model_.copy_latency : 0);
}

void Core::wait_flag(int event, int id) {
  NGRAM_TWIN_CHECK(id >= 0 && id < kNumEventIds && flags_[event][id].is_set,
                   "block %d: WaitFlag<%s_%s>(%d): never set, the core would hang", block_,
                   kPipeNames[event / kNumPipes], kPipeNames[event % kNumPipes], id);
  Flag& flag = flags_[event][id];
  if (unreserved_flag_ == &flag) unreserved_flag_ = nullptr;
  ++cost[kSyncs];
  times_[kS] += model_.issue;
  flag.is_set = false;
  const int pipe = event % kNumPipes;
  for (int q = 0; q < kNumPipes; ++q)
    complete_ticks_[pipe][q] = std::max(complete_ticks_[pipe][q], flag.complete_ticks[q]);
  times_[pipe] = std::max(times_[pipe], flag.time);
}

// Global memory.

void GlobalMemory::check_access(uintptr_t address, uint64_t bytes, bool is_write, const char* call_name) const {
  const Region* overlapping = nullptr;
  for (const Region& region : regions_) {
    if (region.contains(address, bytes)) {
      NGRAM_TWIN_CHECK(!is_write || region.writable, "%s: writes to %s, which the launch may only read", call_name,
                       region.name);
      return;
    }
    if (address + bytes > region.begin && address < region.begin + region.span()) overlapping = &region;
  }
  if (overlapping == nullptr) {
    NGRAM_TWIN_FAULT("%s: %s of %llu bytes of global memory at %p, outside every tensor of the launch", call_name,
                     is_write ? "write" : "read", static_cast<unsigned long long>(bytes),
                     reinterpret_cast<void*>(address));
  }
  NGRAM_TWIN_FAULT(
      "%s: %s of bytes [%lld, %lld) of %s (%llu rows of %llu bytes, %llu apart) leaves its rows", call_name,
      is_write ? "write" : "read", static_cast<long long>(address) - static_cast<long long>(overlapping->begin),
      static_cast<long long>(address + bytes) - static_cast<long long>(overlapping->begin), overlapping->name,
      static_cast<unsigned long long>(overlapping->rows), static_cast<unsigned long long>(overlapping->row_bytes),
      static_cast<unsigned long long>(overlapping->pitch));
}

void GlobalMemory::load_line(uintptr_t line, uint8_t* data) const {
  for (const Region& region : regions_) {
    if (region.span() == 0 || line + kScalarLineBytes <= region.begin || line >= region.begin + region.span()) continue;
    for (uint64_t i = 0; i < kScalarLineBytes; ++i)
      if (region.contains(line + i, 1)) data[i] = *reinterpret_cast<const uint8_t*>(line + i);
  }
}

namespace {

// Returns the intervals that one list of each log contains, sorted by their beginnings.
std::vector<Interval> collect_intervals(const std::vector<AccessLog>& logs, std::vector<Interval> AccessLog::* list) {
  std::vector<Interval> intervals;
  for (const AccessLog& log : logs) intervals.insert(intervals.end(), (log.*list).begin(), (log.*list).end());
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  return intervals;
}

// Throws if an interval of `a` overlaps an interval of `b` of another core, or of any core. Both lists are sorted by
// `begin`.
void check_no_overlap(const std::vector<Interval>& a, const std::vector<Interval>& b, const char* conflict,
                      bool of_any_core = false) {
  // max_ends[i]: the largest end of the intervals 0 to i of b. A search in descending order stops when it is too small.
  std::vector<uintptr_t> max_ends(b.size());
  uintptr_t max_end = 0;
  for (size_t i = 0; i < b.size(); ++i) max_ends[i] = max_end = std::max(max_end, b[i].end);
  for (const Interval& x : a) {
    const auto end = std::partition_point(b.begin(), b.end(), [&](const Interval& y) { return y.begin < x.end; });
    for (size_t i = static_cast<size_t>(end - b.begin()); i-- > 0 && max_ends[i] > x.begin;) {
      const Interval& y = b[i];
      NGRAM_TWIN_CHECK(y.end <= x.begin || (y.core == x.core && !of_any_core),
                       "blocks %d and %d: %s, at %p of global memory", x.core, y.core, conflict,
                       reinterpret_cast<void*>(std::max(x.begin, y.begin)));
    }
  }
}

}  // namespace

uint64_t count_max_copies_per_line(const std::vector<AccessLog>& logs) {
  constexpr uintptr_t kLine = 512;
  std::unordered_map<uintptr_t, uint64_t> copies;
  uint64_t max_copies = 0;
  for (const AccessLog& log : logs) {
    for (const auto* list : {&log.reads, &log.writes, &log.atomics}) {
      for (const Interval& x : *list) {
        for (uintptr_t line = x.begin / kLine; line * kLine < x.end; ++line)
          max_copies = std::max(max_copies, ++copies[line]);
      }
    }
  }
  return max_copies;
}

void check_races(const std::vector<AccessLog>& logs) {
  const std::vector<Interval> writes = collect_intervals(logs, &AccessLog::writes);
  const std::vector<Interval> atomics = collect_intervals(logs, &AccessLog::atomics);
  check_no_overlap(writes, writes, "both write the same bytes");
  check_no_overlap(writes, atomics, "one overwrites what the other changes atomically", true);
  for (const auto list : {&AccessLog::reads, &AccessLog::loads}) {
    const std::vector<Interval> reads = collect_intervals(logs, list);
    check_no_overlap(writes, reads, "one writes what the other reads");
    check_no_overlap(atomics, reads, "one reads what the other changes atomically in the same launch", true);
  }
}

// A launch.

constexpr int kNumThreads = 2;

Outcome run(const std::vector<Region>& regions, int32_t num_blocks, const std::function<void()>& kernel,
            const Options& options) {
  static std::mutex launch_mutex;
  const std::lock_guard<std::mutex> launch_lock(launch_mutex);
  static Core cores[kNumThreads];  // kept, because allocating a core is expensive
  const GlobalMemory gm(regions);
  Outcome outcome;
  outcome.costs.resize(static_cast<size_t>(num_blocks));
  std::vector<AccessLog> logs(static_cast<size_t>(num_blocks));
  std::vector<int32_t> order(static_cast<size_t>(num_blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));

  std::atomic<size_t> next{0};
  std::mutex mutex;
  const auto run_blocks = [&](Core* core) {
    Core::current_pointer() = core;
    for (size_t i = next++; i < order.size(); i = next++) {
      const size_t block = static_cast<size_t>(order[i]);
      try {
        core->begin_block(&gm, order[i], options.ub_bytes, options.model, options.races_allowed);
        kernel();
        core->end_block(logs[block], outcome.costs[block]);
      } catch (const Fault& fault) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (outcome.fault.empty()) outcome.fault = fault.what();
        next = order.size();
      }
    }
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < std::min(kNumThreads, num_blocks); ++t) threads.emplace_back(run_blocks, &cores[t]);
  run_blocks(&cores[0]);
  for (std::thread& thread : threads) thread.join();

  if (outcome.fault.empty() && options.model.same_line > 0)
    outcome.max_copies_per_line = count_max_copies_per_line(logs);
  if (outcome.fault.empty() && !options.races_allowed) {
    try {
      check_races(logs);
    } catch (const Fault& fault) {
      outcome.fault = fault.what();
    }
  }
  return outcome;
}

}  // namespace ngram_npu::twin
