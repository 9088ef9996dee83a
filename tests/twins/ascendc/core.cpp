#include "core.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_map>

namespace ngram_npu::twin {

Core::Core() : ub_(kChip.ub_bytes), shadow_(kChip.ub_bytes) {
  for (int p = 0; p < kPipes; ++p) {
    written_[p].resize(kBlocks);
    read_[p].resize(kBlocks);
  }
  top_ = kChip.ub_bytes;  // the first begin() clears it all
}

Core*& Core::of_this_thread() {
  static thread_local Core* core = nullptr;
  return core;
}

void scalar_load(const void* from, void* to, size_t bytes) {
  std::memcpy(to, Core::current().gm_scalar(reinterpret_cast<uintptr_t>(from), bytes), bytes);
}

void scalar_store(void* to) {
  NGRAM_TWIN_FAULT("block %d: a scalar store to global memory at %p", Core::current().block(), to);
}

void Core::begin(const GlobalMemory* gm, int32_t block, int32_t blocks, uint32_t ub_bytes, const CostModel& model,
                 bool races_allowed) {
  std::fill_n(ub_.begin(), top_, uint8_t{0xA5});
  std::fill_n(shadow_.begin(), top_, uint8_t{0xFF});
  for (int p = 0; p < kPipes; ++p) {
    std::fill_n(written_[p].begin(), top_ / kBlockBytes, 0u);
    std::fill_n(read_[p].begin(), top_ / kBlockBytes, 0u);
  }
  top_ = 0;
  buffers_.clear();
  gm_ = gm;
  log_ = AccessLog();
  cache_.clear();
  for (uint32_t* ticks : {tick_, last_write_, last_read_}) std::fill_n(ticks, kPipes, 0u);
  std::fill_n(&clock_[0][0], kPipes * kPipes, 0u);
  for (auto& of_event : flags_) std::fill(std::begin(of_event), std::end(of_event), Flag());
  std::fill_n(taken_, kEvents, uint8_t{0});
  model_ = model;
  std::fill_n(time_, kPipes, 0.0);
  cost = Cost();
  block_ = block;
  blocks_ = blocks;
  ub_bytes_ = ub_bytes;
  races_allowed_ = races_allowed;
  pipes_made_ = 0;
  issued_ = 0;
}

void Core::end(AccessLog& log, Cost& total) {
  for (int e = 0; e < kEvents; ++e) {
    for (int id = 0; id < 8; ++id) {
      NGRAM_TWIN_CHECK(!flags_[e][id].set, "block %d: flag %s_%s %d is set and never waited for", block_,
                       kPipeNames[e / kPipes], kPipeNames[e % kPipes], id);
    }
  }
  cost[kCycles] = *std::max_element(time_, time_ + kPipes);
  log = std::move(log_);
  total = cost;
}

int32_t Core::new_buffer(uint32_t bytes) {
  const uint32_t rounded = (bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes;
  NGRAM_TWIN_CHECK(bytes > 0, "InitBuffer: a length of 0");
  const uint32_t budget = ub_bytes_ - kChip.ub_reserved_bytes;
  NGRAM_TWIN_CHECK(rounded <= budget && top_ <= budget - rounded,
                   "InitBuffer: %u more bytes after %u leave the %u bytes of UB", rounded, top_, budget);
  NGRAM_TWIN_CHECK(buffers_.size() < kMaxBuffers, "InitBuffer: more than %d buffers", kMaxBuffers);
  Buffer made;
  made.begin = top_;
  made.bytes = rounded;
  top_ += rounded;
  buffers_.push_back(made);
  return static_cast<int32_t>(buffers_.size()) - 1;
}

Place Core::allocate(int32_t index) {
  Buffer& b = buffer(index);
  b.state = BufferState::kAllocated;
  ++b.generation;
  std::fill_n(shadow_.begin() + b.begin, b.bytes, uint8_t{0xFF});
  return place(index);
}

void Core::release(int32_t index) {
  Buffer& b = buffer(index);
  b.state = BufferState::kFree;
  ++b.generation;
}

Buffer& Core::live(const Place& place, const char* what) {
  NGRAM_TWIN_CHECK(place.buffer >= 0, "block %d: %s: a tensor without a buffer", block_, what);
  Buffer& b = buffer(place.buffer);
  NGRAM_TWIN_CHECK(b.generation == place.generation, "block %d: %s: a tensor that was freed or is in the queue", block_,
                   what);
  return b;
}

void Core::wait_until_emptied(int32_t index) {
  auto& emptied = buffer(index).emptied;
  if (emptied.event < 0) return;
  wait_flag(emptied.event, emptied.id);
  release_event(emptied.event, emptied.id);
  emptied.event = -1;
}

void Core::pipe_gone() {
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& b = buffers_[i];
    NGRAM_TWIN_CHECK(!b.queued_ever || b.state == BufferState::kFree, "block %d: a tensor of a queue is never freed",
                     block_);
    wait_until_emptied(static_cast<int32_t>(i));
  }
}

void Core::issue(Pipe pipe, const char* what) {
  constexpr uint64_t kMost = 20'000'000;  // fifty times the count of the tests' largest batch
  NGRAM_TWIN_CHECK(++issued_ < kMost, "block %d: %s: the kernel does not seem to end", block_, what);
  pipe_ = pipe;
  what_ = what;
  if (pipe == kS) {
    clock_[kS][kS] = ++tick_[kS];
    return;
  }
  time_[kS] += model_.issue;
  time_[pipe] = std::max(time_[pipe], time_[kS]);
  // It is issued after everything S has waited for. S has not waited for its own accesses: they may be in flight.
  for (int q = 1; q < kPipes; ++q) clock_[pipe][q] = std::max(clock_[pipe][q], clock_[kS][q]);
  clock_[pipe][pipe] = ++tick_[pipe];
}

uint8_t* Core::use(const Place& place, uint64_t bytes, uint32_t align, bool write) {
  const Buffer& b = live(place, what_);
  NGRAM_TWIN_CHECK(place.address % align == 0, "block %d: %s: operand at UB byte %u, not aligned to %u bytes", block_,
                   what_, place.address, align);
  NGRAM_TWIN_CHECK(place.address >= b.begin && place.address + bytes <= b.begin + b.bytes,
                   "block %d: %s: %s of bytes [%lld, %lld) of a tensor of %u bytes", block_, what_,
                   write ? "write" : "read", static_cast<long long>(place.address) - b.begin,
                   static_cast<long long>(place.address + bytes) - b.begin, b.bytes);
  order(place.address, bytes, write);
  return ub_.data() + place.address;
}

void Core::order(uint32_t address, uint64_t bytes, bool write) {
  if (bytes == 0) return;
  const uint32_t first = address / kBlockBytes;
  const uint32_t last = static_cast<uint32_t>((address + bytes - 1) / kBlockBytes);
  const auto latest = [&](const std::vector<uint32_t>& ticks) {
    uint32_t most = 0;
    for (uint32_t i = first; i <= last; ++i) most = std::max(most, ticks[i]);
    return most;
  };
  for (int q = 0; q < kPipes; ++q) {
    const uint32_t known = clock_[pipe_][q];
    const bool may_write = last_write_[q] > known;
    const bool may_read = write && last_read_[q] > known;
    if (q == pipe_ || !(may_write || may_read)) continue;
    const uint32_t written = may_write ? latest(written_[q]) : 0;
    const uint32_t read = may_read ? latest(read_[q]) : 0;
    NGRAM_TWIN_CHECK(written <= known, "block %d: %s on pipe %s %s what pipe %s wrote, and nothing orders them", block_,
                     what_, kPipeNames[pipe_], write ? "overwrites" : "reads", kPipeNames[q]);
    NGRAM_TWIN_CHECK(read <= known, "block %d: %s on pipe %s overwrites what pipe %s reads, and nothing orders them",
                     block_, what_, kPipeNames[pipe_], kPipeNames[q]);
  }
  (write ? last_write_ : last_read_)[pipe_] = tick_[pipe_];
  std::vector<uint32_t>& ticks = write ? written_[pipe_] : read_[pipe_];
  std::fill(ticks.begin() + first, ticks.begin() + last + 1, tick_[pipe_]);
}

void Core::spend(double cycles) { time_[pipe_] += cycles; }

void Core::vector_cost(uint64_t bytes, Speed speed) {
  const uint64_t repeats = (bytes + kRepeatBytes - 1) / kRepeatBytes;
  ++cost[kVectorInstructions];
  cost[kVectorRepeats] += static_cast<double>(repeats);
  spend(model_.vector_startup +
        static_cast<double>(repeats) * (speed == Speed::kGather ? model_.gather_repeat : model_.vector_repeat));
}

void Core::copy_cost(uint64_t bytes, bool to_gm) {
  ++cost[kCopies];
  cost[to_gm ? kUbToGmBytes : kGmToUbBytes] += static_cast<double>(bytes);
  spend(static_cast<double>(bytes) * model_.cycles_per_byte(blocks_));
}

// Throws if the present instruction touches what the list's pipe may still be accessing. The list's ticks rise.
void Core::check_gm_order(const std::vector<Interval>& list, Pipe of, uintptr_t at, uint64_t bytes, const char* by) {
  for (size_t i = list.size(); !races_allowed_ && i-- > 0 && list[i].tick > clock_[pipe_][of];) {
    NGRAM_TWIN_CHECK(list[i].end <= at || list[i].begin >= at + bytes,
                     "block %d: %s on pipe %s touches global memory that pipe %s, and nothing orders them", block_,
                     what_, kPipeNames[pipe_], by);
  }
}

void Core::gm_copy(uintptr_t at, uint64_t bytes, bool write) {
  gm_->check(at, bytes, write, what_);
  if (write) {
    check_gm_order(log_.reads, kMte2, at, bytes, "MTE2 still reads");
    check_gm_order(log_.loads, kS, at, bytes, "S still reads");
  } else {
    check_gm_order(log_.writes, kMte3, at, bytes, "MTE3 still writes");
  }
  AccessLog::add(write ? log_.writes : log_.reads, at, bytes, block_, tick_[pipe_]);
}

ScalarLine& Core::line_of(uintptr_t line) {
  ++cost[kScalarGm];
  const auto [entry, missed] = cache_.try_emplace(line);
  if (missed) {
    gm_->load_line(line, entry->second.data);
    ++cost[kScalarGmMisses];
  }
  time_[kS] += missed ? model_.scalar_gm_miss : model_.scalar_gm;
  return entry->second;
}

const uint8_t* Core::gm_scalar(uintptr_t at, uint64_t bytes) {
  issue(kS, "a scalar load");
  gm_->check(at, bytes, false, what_);
  NGRAM_TWIN_CHECK(at % bytes == 0, "block %d: %s: not aligned", block_, what_);
  check_gm_order(log_.writes, kMte3, at, bytes, "MTE3 still writes");
  const uintptr_t line = at / kScalarLine * kScalarLine;
  ScalarLine& cached = line_of(line);
  const bool old = std::memcmp(cached.data + (at - line), reinterpret_cast<void*>(at), bytes) != 0;
  NGRAM_TWIN_CHECK(races_allowed_ || !old,
                   "block %d: %s: the scalar cache holds an old copy of global memory that has changed since", block_,
                   what_);
  // A cache may evict a line at any time, so a read returns either the old copy or the present bytes.
  if (old && issued_ % 2 == 0) gm_->load_line(line, cached.data);
  AccessLog::add(log_.loads, at, bytes, block_, tick_[kS]);
  return cached.data + (at - line);
}

int Core::fetch_event(int event) const {
  for (int id = 0; id < kEventIds; ++id)
    if ((taken_[event] >> id & 1) == 0) return id;
  NGRAM_TWIN_FAULT("block %d: no event ID left of %s_%s: all %d are taken", block_, kPipeNames[event / kPipes],
                   kPipeNames[event % kPipes], kEventIds);
}

int Core::alloc_event(int event) {
  const int id = fetch_event(event);
  taken_[event] = static_cast<uint8_t>(taken_[event] | 1 << id);
  return id;
}

void Core::release_event(int event, int id) { taken_[event] = static_cast<uint8_t>(taken_[event] & ~(1 << id)); }

void Core::set_flag(int event, int id) {
  NGRAM_TWIN_CHECK(id >= 0 && id < kEventIds, "block %d: SetFlag<%s_%s>(%d): the IDs are 0 to %d", block_,
                   kPipeNames[event / kPipes], kPipeNames[event % kPipes], id, kEventIds - 1);
  Flag& flag = flags_[event][id];
  NGRAM_TWIN_CHECK(!flag.set, "block %d: SetFlag<%s_%s>(%d): set already, and not waited for", block_,
                   kPipeNames[event / kPipes], kPipeNames[event % kPipes], id);
  ++cost[kSyncs];
  const auto from = static_cast<Pipe>(event / kPipes);
  issue(from, "SetFlag");
  flag.set = true;
  std::copy_n(clock_[from], static_cast<size_t>(kPipes), flag.clock);
  flag.time = time_[from] + model_.sync + (from == kMte2 || from == kMte3 ? model_.copy_latency : 0);
}

void Core::wait_flag(int event, int id) {
  NGRAM_TWIN_CHECK(id >= 0 && id < kEventIds && flags_[event][id].set,
                   "block %d: WaitFlag<%s_%s>(%d): never set, the core would hang", block_, kPipeNames[event / kPipes],
                   kPipeNames[event % kPipes], id);
  Flag& flag = flags_[event][id];
  ++cost[kSyncs];
  time_[kS] += model_.issue;
  flag.set = false;
  const int to = event % kPipes;
  for (int q = 0; q < kPipes; ++q) clock_[to][q] = std::max(clock_[to][q], flag.clock[q]);
  time_[to] = std::max(time_[to], flag.time);
}

// Global memory.

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
  // For each interval of b, the furthest end so far: a search stops there.
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

// A launch.

namespace {

// Allocating a core is expensive, so cores are kept and reused.
class Cores {
 public:
  std::unique_ptr<Core> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Core>();
    std::unique_ptr<Core> core = std::move(idle_.back());
    idle_.pop_back();
    return core;
  }
  void give_back(std::unique_ptr<Core> core) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(core));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Core>> idle_;
};

}  // namespace

Outcome run(const std::vector<Region>& regions, int32_t blocks, const std::function<void()>& kernel,
            const Options& options) {
  const GlobalMemory gm(regions);
  Outcome outcome;
  outcome.costs.resize(static_cast<size_t>(blocks));
  std::vector<AccessLog> logs(static_cast<size_t>(blocks));
  std::vector<int32_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));

  std::atomic<size_t> next{0};
  std::mutex mutex;
  static Cores cores;
  const auto work = [&] {
    std::unique_ptr<Core> core = cores.take();
    Core::of_this_thread() = core.get();
    for (size_t i = next++; i < order.size(); i = next++) {
      const size_t block = static_cast<size_t>(order[i]);
      try {
        core->begin(&gm, order[i], blocks, options.ub_bytes, options.model, options.races_allowed);
        kernel();
        core->end(logs[block], outcome.costs[block]);
      } catch (const Fault& fault) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (outcome.fault.empty()) outcome.fault = fault.what();
        next = order.size();
      }
    }
    cores.give_back(std::move(core));
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < std::min(options.threads, blocks); ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  if (outcome.fault.empty() && options.model.same_line > 0) outcome.same_line = copies_at_one_line(logs);
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
