// One simulated vector core: its unified buffer (UB) with a shadow, pipes, event flags, scalar cache, and costs.
//
// The shadow has one bit per bit of UB; 1 means that the bit is uninitialized ("poison"). Calls propagate poison
// bit by bit, as the operation propagates the values. Using poison is a fault: a scalar read, a store to global memory,
// an index.
//
// Each pipe has a clock, which advances by one tick per instruction. For each pipe, the core stores up to which tick of
// each other pipe the instructions are known to be complete. It is a fault to access data of another pipe unless the
// other pipe's instruction is known to be complete. Only queues and flags give this knowledge: the model assumes no
// flags that a compiler inserts. Within V, the compiler or the chip keeps the order.
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

enum Pipe : int { kS = 0, kV = 1, kMte2 = 2, kMte3 = 3, kNumPipes = 4 };

// The model's cost of each operation, in cycles of the vector core's clock unless stated otherwise. By default all
// costs are 0. tools/npu/lookup_costs.py sets the costs and names their sources.
struct CostModel {
  double copy_bytes_per_cycle = 1e9;  // of one core
  double gm_bytes_per_cycle = 1e9;    // of all cores of a launch together
  double copy_latency = 0;            // from a copy's last byte until another pipe may continue
  double vector_startup = 0;          // per vector instruction
  double vector_repeat = 0;           // per 256 bytes of the widest operand
  double gather_repeat = 0;           // per 256 bytes of gathered results
  double issue = 0;                   // of the scalar unit, per instruction of another pipe
  double scalar_ub = 0;               // per GetValue or SetValue on UB
  double scalar_gm = 0;               // per load that hits the scalar cache
  double scalar_gm_miss = 0;          // per load that misses the scalar cache
  double sync = 0;                    // from setting a flag until the other pipe may continue
  double same_line = 0;               // per copy to the 512-byte line with the most copies, added to the launch's time
};

// The items that a core counts, in the order of ngram_npu_ascendc_twin_take_cost.
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
  kCycles,  // modelled time until the slowest pipe is done
  kNumCostItems,
};
using Cost = std::array<double, kNumCostItems>;

constexpr const char* kPipeNames[kNumPipes] = {"S", "V", "MTE2", "MTE3"};

enum class BufferState : uint8_t { kFree, kAllocated, kQueued };

struct Buffer {
  uint32_t begin = 0;
  uint32_t bytes = 0;
  uint32_t generation = 0;  // a tensor of an earlier generation is stale
  BufferState state = BufferState::kFree;
  bool was_allocated = false;   // whether AllocTensor of a queue has returned the buffer
  bool allows_copies = true;    // whether the chip's documents allow DataCopyPad at the buffer's TPosition
  bool allows_atomics = false;  // whether the buffer is at VECOUT, from which copies may be atomic
  // For a free buffer of a queue: the flag that signals that the last user of the buffer is done; event -1: none.
  struct {
    int event = -1;
    int id = 0;
  } release_flag;
};

// The location of a tensor in UB: the part of LocalTensor that does not depend on the element type.
struct TensorLocation {
  uint32_t address = 0;
  int32_t buffer = -1;
  uint32_t generation = 0;
};

struct Flag {
  bool is_set = false;
  uint32_t complete_ticks[kNumPipes] = {};  // of each pipe, when the flag was set
  double time = 0;                          // modelled time at which the waiting pipe may continue
};

enum class CopyKind : uint8_t { kRead, kWrite, kAtomic };

enum class Speed : uint8_t { kNormal, kGather };

class Core {
 public:
  Core();
  Core(const Core&) = delete;

  // The core that the calling thread simulates.
  static Core& current() { return *current_pointer(); }
  static Core*& current_pointer();

  void begin_block(const GlobalMemory* gm, int32_t block, uint32_t ub_bytes, const CostModel& model,
                   bool races_allowed);
  // Ends the block and returns its log and cost. Throws if a flag is still set.
  void end_block(AccessLog& log, Cost& cost);

  int32_t block() const { return block_; }

  // Buffers.
  int32_t new_buffer(uint32_t bytes);
  Buffer& buffer(int32_t index) { return buffers_[static_cast<size_t>(index)]; }
  TensorLocation allocate(int32_t index);
  void release(int32_t index);
  TensorLocation locate(int32_t index) { return {buffer(index).begin, index, buffer(index).generation}; }
  // Returns the buffer of a tensor. Throws if the tensor was freed or is in a queue.
  Buffer& get_live_buffer(const TensorLocation& location, const char* call_name);
  void record_tpipe_construction() { NGRAM_TWIN_CHECK(++num_tpipes_ == 1, "TPipe: a second one in one kernel"); }
  // Throws if a tensor of a queue was not freed. Waits for the last users of the queues' buffers.
  void finish_tpipe();
  void wait_for_release(int32_t index);

  // Begins an instruction of a pipe. The following accesses belong to this instruction.
  void issue(Pipe pipe, const char* call_name);
  // Access UB memory and return a pointer to it. Throw unless the access is in the bounds of a live buffer, aligned to
  // `align` bytes, and ordered after conflicting accesses of other pipes.
  uint8_t* read(const TensorLocation& location, uint64_t bytes, uint32_t align = kBlockBytes) {
    return access_ub(location, bytes, align, false);
  }
  uint8_t* write(const TensorLocation& location, uint64_t bytes, uint32_t align = kBlockBytes) {
    return access_ub(location, bytes, align, true);
  }
  uint8_t* shadow(const uint8_t* ub) { return shadow_.data() + (ub - ub_.data()); }
  const char* call_name() const { return call_name_; }
  [[noreturn]] void fail_on_poison() const {
    NGRAM_TWIN_FAULT("block %d: %s: uses uninitialized UB", block_, call_name_);
  }
  void add_cycles(double cycles);
  void add_scalar_ub_cost() { times_[kS] += model_.scalar_ub; }
  void add_vector_cost(uint64_t bytes, Speed speed = Speed::kNormal);
  void add_copy_cost(uint64_t bytes, bool to_gm);

  // Global memory. Throw unless the access is in bounds and ordered after this block's conflicting accesses.
  void record_gm_copy(uintptr_t address, uint64_t bytes, CopyKind kind);
  const uint8_t* load_gm_scalar(uintptr_t address, uint64_t bytes);

  // The element type of the atomic maximum that copies to global memory compute; kNoType: copies overwrite.
  void set_atomic_max(uint32_t dtype) {
    issue(kS, dtype == kNoType ? "SetAtomicNone" : "SetAtomicMax");
    atomic_dtype_ = dtype;
  }
  uint32_t atomic_dtype() const { return atomic_dtype_; }

  // Events and flags. `event` is HardEvent as a number.
  int alloc_event(int event);
  int fetch_event(int event) const;
  void release_event(int event, int id);
  // Like release_event(), for a kernel's call. Throws if the ID is not allocated or its flag is set.
  void check_and_release_event(int event, int id);
  void set_flag(int event, int id);
  void wait_flag(int event, int id);

  Cost cost{};

 private:
  static constexpr uint32_t kNumUbBlocks = kChip.ub_bytes / kBlockBytes;
  static constexpr int kNumEvents = kNumPipes * kNumPipes;

  uint8_t* access_ub(const TensorLocation& location, uint64_t bytes, uint32_t align, bool is_write);
  void check_ub_order(uint32_t address, uint64_t bytes, bool is_write);
  void check_gm_order(const std::vector<Interval>& list, Pipe list_pipe, uintptr_t address, uint64_t bytes,
                      const char* list_access);
  ScalarLine& find_cached_line(uintptr_t line);

  std::vector<uint8_t> ub_;
  std::vector<uint8_t> shadow_;
  std::vector<uint32_t> write_ticks_[kNumPipes];  // per pipe, for each 32 bytes of UB: the tick of the last write
  std::vector<uint32_t> read_ticks_[kNumPipes];   // the same for reads
  uint32_t num_allocated_bytes_ = 0;
  std::vector<Buffer> buffers_;

  const GlobalMemory* gm_ = nullptr;
  AccessLog log_;
  std::unordered_map<uintptr_t, ScalarLine> cache_;

  Pipe pipe_ = kS;              // of the present instruction
  const char* call_name_ = "";  // of the present instruction
  uint32_t ticks_[kNumPipes] = {};
  uint32_t last_write_ticks_[kNumPipes] = {};  // the tick of each pipe's last write anywhere in UB
  uint32_t last_read_ticks_[kNumPipes] = {};
  // [a][b]: the instructions of pipe b up to this tick are complete when the next instruction of pipe a begins.
  uint32_t complete_ticks_[kNumPipes][kNumPipes] = {};
  Flag flags_[kNumEvents][8];
  uint8_t used_event_ids_[kNumEvents] = {};  // one bit per allocated ID
  // The flag that the last instruction set with an ID that is not allocated; null: none.
  const Flag* unreserved_flag_ = nullptr;
  uint32_t atomic_dtype_ = kNoType;

  CostModel model_;
  double times_[kNumPipes] = {};  // modelled cycles
  int32_t block_ = 0;
  uint32_t ub_bytes_ = 0;
  bool races_allowed_ = false;
  int num_tpipes_ = 0;
  uint64_t num_instructions_ = 0;
};

struct Outcome {
  std::string fault;                 // message of the first fault; empty: no fault
  std::vector<Cost> costs;           // per block
  uint64_t max_copies_per_line = 0;  // largest number of copies that access the same 512-byte line of global memory
};

struct Options {
  uint64_t seed = 0;
  uint32_t ub_bytes = kChip.ub_bytes;
  CostModel model;
  // The launch breaks the contract on purpose: only accesses outside its tensors are faults.
  bool races_allowed = false;
};

// Runs a launch. Its blocks run in shuffled order on several threads, each block on a simulated core. Launches of
// several callers wait for each other.
Outcome run(const std::vector<Region>& regions, int32_t num_blocks, const std::function<void()>& kernel,
            const Options& options);

}  // namespace ngram_npu::twin
