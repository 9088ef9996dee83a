// One simulated vector core: its unified buffer with a shadow, the order of its pipes, its event flags, its scalar
// cache, and the cost of its work.
//
// The shadow holds a bit per bit of UB: 1 = never computed ("poison"). Calls propagate poison bit by bit where
// the operation does; using it (a scalar read, a store to global memory, an index, a reduction) is a fault.
//
// The order: each pipe has a clock. Every instruction is one tick, and knows which tick of each other pipe came before
// it. Using data of another pipe is a fault unless its tick is known to be over: between pipes all order comes from a
// queue or a flag, and nothing from a compiler that inserts them. Within V the build or the chip keeps the order.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "chip.h"
#include "gm.h"

namespace ngram_npu::twin {

enum Pipe : int { kS = 0, kV = 1, kMte2 = 2, kMte3 = 3, kPipes = 4 };

// The model's price of each thing, in cycles of the vector core's clock unless stated otherwise. By default everything
// is free; a caller that wants times sets the prices and names their sources (tools/bench/ops/ascendc_model.py).
struct CostModel {
  double copy_bytes_per_cycle = 1e9;  // of one core
  double gm_bytes_per_cycle = 1e9;    // that all cores of a launch share
  double copy_latency = 0;            // from a copy's last byte until another pipe may continue
  double vector_startup = 0;          // of every vector instruction
  double vector_repeat = 0;           // 256 bytes of the widest operand
  double gather_repeat = 0;           // as many addresses as make 256 bytes of results
  double issue = 0;                   // the scalar unit's work for an instruction that it hands to a pipe
  double scalar_ub = 0;               // GetValue, SetValue on UB
  double scalar_gm = 0;               // a load that hits the scalar cache
  double scalar_gm_miss = 0;          // a load that misses it
  double sync = 0;                    // a flag set and waited for, a barrier
  double same_line = 0;               // a copy's turn at 512 bytes that another core is accessing

  double cycles_per_byte(int32_t cores) const {
    const double share = gm_bytes_per_cycle / cores;
    return 1 / (share < copy_bytes_per_cycle ? share : copy_bytes_per_cycle);
  }
};

// What is counted, in the order of ngram_npu_ascendc_twin_take_cost.
enum CostItem : size_t {
  kGmToUbBytes,
  kUbToGmBytes,
  kCopies,
  kVectorInstructions,
  kVectorRepeats,
  kScalarUb,
  kScalarGm,
  kScalarGmMisses,
  kSyncs,
  kCycles,  // modelled: until the slowest pipe is done
  kCostItems,
};
using Cost = std::array<double, kCostItems>;

constexpr const char* kPipeNames[kPipes] = {"S", "V", "MTE2", "MTE3"};

enum class BufferState : uint8_t { kFree, kAllocated, kQueued };

struct Buffer {
  uint32_t begin = 0;
  uint32_t bytes = 0;
  uint32_t generation = 0;  // a tensor of an earlier generation is stale
  BufferState state = BufferState::kFree;
  bool queued_ever = false;
  bool copies = true;  // whether the chip documents DataCopyPad for its position
  // For a free buffer of a queue: the flag (event and ID) that signals that its last user is done.
  struct {
    int event = -1;
    int id = 0;
  } emptied;
};

// Where a tensor lies: the part of LocalTensor that does not depend on its type.
struct Place {
  uint32_t address = 0;
  int32_t buffer = -1;
  uint32_t generation = 0;
};

struct Flag {
  bool set = false;
  uint32_t clock[kPipes] = {};
  double time = 0;
};

enum class Speed : uint8_t { kNormal, kGather };

class Core {
 public:
  Core();
  Core(const Core&) = delete;

  // The one this thread simulates.
  static Core& current() { return *of_this_thread(); }
  static Core*& of_this_thread();

  void begin(const GlobalMemory* gm, int32_t block, int32_t blocks, uint32_t ub_bytes, const CostModel& model,
             bool races_allowed);
  // Ends the block: throws if the kernel left something it must not, and hands over the block's log and cost.
  void end(AccessLog& log, Cost& cost);

  int32_t block() const { return block_; }

  // Buffers.
  int32_t new_buffer(uint32_t bytes);
  Buffer& buffer(int32_t index) { return buffers_[static_cast<size_t>(index)]; }
  Place allocate(int32_t index);
  void release(int32_t index);
  Place place(int32_t index) { return {buffer(index).begin, index, buffer(index).generation}; }
  // Throws unless the place belongs to the buffer's present generation.
  Buffer& live(const Place& place, const char* what);
  void pipe_made() { NGRAM_TWIN_CHECK(++pipes_made_ == 1, "TPipe: a second one in one kernel"); }
  void pipe_gone();
  void wait_until_emptied(int32_t index);

  // Begins one instruction of a pipe; the accesses that follow belong to it.
  void issue(Pipe pipe, const char* what);
  // The accesses of the present instruction: in bounds, alive, aligned to `align`, ordered. They return UB memory.
  uint8_t* read(const Place& place, uint64_t bytes, uint32_t align = kBlockBytes) {
    return use(place, bytes, align, false);
  }
  uint8_t* write(const Place& place, uint64_t bytes, uint32_t align = kBlockBytes) {
    return use(place, bytes, align, true);
  }
  uint8_t* shadow(const uint8_t* ub) { return shadow_.data() + (ub - ub_.data()); }
  const char* what() const { return what_; }
  [[noreturn]] void poisoned() const {
    NGRAM_TWIN_FAULT("block %d: %s: uses UB that nothing has computed", block_, what_);
  }
  void spend(double cycles);
  void scalar_ub_cost() { time_[kS] += model_.scalar_ub; }
  void vector_cost(uint64_t bytes, Speed speed = Speed::kNormal);
  void copy_cost(uint64_t bytes, bool to_gm);

  // Global memory.
  void gm_copy(uintptr_t at, uint64_t bytes, bool write);
  const uint8_t* gm_scalar(uintptr_t at, uint64_t bytes);

  // Order.
  int alloc_event(int event);
  int fetch_event(int event) const;
  void release_event(int event, int id);
  void set_flag(int event, int id);
  void wait_flag(int event, int id);

  Cost cost{};

 private:
  static constexpr uint32_t kBlocks = kChip.ub_bytes / kBlockBytes;
  static constexpr int kEvents = kPipes * kPipes;

  uint8_t* use(const Place& place, uint64_t bytes, uint32_t align, bool write);
  void order(uint32_t address, uint64_t bytes, bool write);
  void check_gm_order(const std::vector<Interval>& list, Pipe of, uintptr_t at, uint64_t bytes, const char* by);
  ScalarLine& line_of(uintptr_t line);

  std::vector<uint8_t> ub_;
  std::vector<uint8_t> shadow_;
  std::vector<uint32_t> written_[kPipes];  // per 32 bytes: the tick of each pipe's last write
  std::vector<uint32_t> read_[kPipes];
  uint32_t top_ = 0;
  std::vector<Buffer> buffers_;

  const GlobalMemory* gm_ = nullptr;
  AccessLog log_;
  std::unordered_map<uintptr_t, ScalarLine> cache_;

  Pipe pipe_ = kS;
  const char* what_ = "";
  uint32_t tick_[kPipes] = {};
  uint32_t last_write_[kPipes] = {};  // the tick of each pipe's last write anywhere in UB
  uint32_t last_read_[kPipes] = {};
  uint32_t clock_[kPipes][kPipes] = {};  // [a][b]: the tick of b that a's next instruction comes after
  Flag flags_[kEvents][8];
  uint8_t taken_[kEvents] = {};  // event IDs in use, one bit each

  CostModel model_;
  double time_[kPipes] = {};
  int32_t block_ = 0;
  int32_t blocks_ = 0;
  uint32_t ub_bytes_ = 0;
  bool races_allowed_ = false;
  int pipes_made_ = 0;
  uint64_t issued_ = 0;
};

// A launch: its blocks run in shuffled order on threads, one simulated core each.
struct Outcome {
  std::string fault;        // empty: no fault
  std::vector<Cost> costs;  // per block
  uint64_t same_line = 0;   // the most copies that cores made at one 512-byte line of global memory
};

struct Options {
  uint64_t seed = 0;
  int threads = 2;
  uint32_t ub_bytes = kChip.ub_bytes;
  CostModel model;
  bool races_allowed = false;  // the launch breaks the rules on purpose: it must still stay inside its tensors
};

Outcome run(const std::vector<Region>& regions, int32_t blocks, const std::function<void()>& kernel,
            const Options& options);

}  // namespace ngram_npu::twin
