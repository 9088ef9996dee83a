#include "grid.h"

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace twin {

// Messages.

std::string describe(const Thread& thread) {
  const uint3 block = thread.block->index;
  return format_text("thread %d of block (%u, %u, %u)", thread.index_in_block, block.x, block.y, block.z);
}

std::string describe(const CallSite& site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name == nullptr ? site.file : name + 1) + ":" + std::to_string(site.line);
}

std::string format_text(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

std::string describe_waiting_threads(const Block& block) {
  std::string text;
  int num_described = 0;
  const Thread* previous = nullptr;
  for (const Thread& t : block.threads) {
    if (t.state == ThreadState::kDone) continue;
    const bool is_like_previous = previous != nullptr && previous->state == t.state &&
                                  previous->call_site.line == t.call_site.line && previous->mask == t.mask;
    previous = &t;
    if (is_like_previous) continue;
    if (++num_described > 4) return text + "; ...";
    text += (text.empty() ? "" : "; ") + describe(t) + " waits ";
    if (t.state == ThreadState::kAtBarrier) {
      text += "at the barrier of " + describe(t.call_site);
    } else {
      text += format_text("in %s at %s for the lanes with mask %08x; the lanes with mask %08x have left the kernel",
                          get_name(t.collective), describe(t.call_site).c_str(), t.mask,
                          t.mask & ~block.running_lanes[static_cast<size_t>(t.warp())]);
    }
  }
  return text;
}

// Warp collectives.

namespace {

int get_source_lane(const Thread& t) {
  if (t.collective == Collective::kShuffle) return t.operand & (kWarpSize - 1);
  return t.lane() < t.operand ? t.lane() : t.lane() - t.operand;
}

uint64_t shuffle(const Thread* lanes, const Thread& t) {
  if (t.operand < 0 && t.collective != Collective::kShuffle) {
    throw Violation{
        format_text("%s at %s by %d lanes", get_name(t.collective), describe(t.call_site).c_str(), t.operand)};
  }
  const int source = get_source_lane(t);
  if ((t.mask >> source & 1u) == 0) {
    throw Violation{format_text("%s at %s: %s reads lane %d, which is not in the mask %08x", get_name(t.collective),
                                describe(t.call_site).c_str(), describe(t).c_str(), source, t.mask)};
  }
  return lanes[source].value;
}

// Sets `value` of the lanes in the mask to the results of their collective.
void compute_results(Thread* lanes, uint32_t mask, Collective collective) {
  uint32_t true_lanes = 0;
  uint64_t maximum = 0;
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    if (lanes[lane].value != 0) true_lanes |= 1u << lane;
    maximum = std::max(maximum, lanes[lane].value);
  }
  uint64_t results[kWarpSize];
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    switch (collective) {
      case Collective::kSync: results[lane] = 0; break;
      case Collective::kShuffle:
      case Collective::kShuffleUp: results[lane] = shuffle(lanes, lanes[lane]); break;
      case Collective::kBallot: results[lane] = true_lanes; break;
      case Collective::kAny: results[lane] = true_lanes != 0; break;
      case Collective::kMax: results[lane] = maximum; break;
    }
  }
  for (uint32_t left = mask; left != 0; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    lanes[lane].value = results[lane];
  }
}

}  // namespace

const char* get_name(Collective collective) {
  switch (collective) {
    case Collective::kSync: return "__syncwarp";
    case Collective::kShuffle: return "__shfl_sync";
    case Collective::kShuffleUp: return "__shfl_up_sync";
    case Collective::kBallot: return "__ballot_sync";
    case Collective::kAny: return "__any_sync";
    default: return "__reduce_max_sync";
  }
}

bool finish_collective_if_complete(Block& block, const Thread& last) {
  const auto warp = static_cast<size_t>(last.warp());
  Thread* lanes = &block.threads[warp * kWarpSize];
  const uint32_t mask = last.mask;
  const uint32_t waiting = block.waiting_lanes[warp] & mask;
  if (const uint32_t missing = mask & ~block.running_lanes[warp]; missing != 0) {
    const int lane = __builtin_ctz(missing);
    const bool exists = lane < block.num_lanes_of_warp(last.warp());
    throw Violation{format_text("%s at %s: the mask %08x of %s names lane %d, which %s", get_name(last.collective),
                                describe(last.call_site).c_str(), mask, describe(last).c_str(), lane,
                                exists ? "has left the kernel" : "the block does not have")};
  }
  bool is_complete = waiting == mask;
  for (uint32_t left = waiting; left != 0; left &= left - 1) {
    const Thread& other = lanes[__builtin_ctz(left)];
    if (other.mask == mask && other.collective == last.collective) continue;
    is_complete = false;
    if ((other.mask >> last.lane() & 1u) != 0) {  // both lanes wait for each other in different collectives
      throw Violation{format_text("%s waits in %s at %s with mask %08x, %s in %s at %s with mask %08x",
                                  describe(last).c_str(), get_name(last.collective), describe(last.call_site).c_str(),
                                  mask, describe(other).c_str(), get_name(other.collective),
                                  describe(other.call_site).c_str(), other.mask)};
    }
  }
  if (is_complete) compute_results(lanes, mask, last.collective);
  return is_complete;
}

namespace {

class Grid;
Grid* grid = nullptr;  // the running launch, or null

constexpr size_t kSharedMargin = 4096;  // bytes before and after a block's dynamic shared memory

void enter_thread();

class Grid {
 public:
  Grid(const cudaLaunchConfig_t& config, SharedMemory shared_memory, void (*function)(void*), void* argument,
       const SimulationOptions& options, uint64_t seed)
      : shared_memory_(shared_memory),
        thread_function_(function),
        thread_argument_(argument),
        options_(options),
        random_(seed),
        barrier_random_(seed),
        thread_order_(random_.next_below(4)) {
    num_threads_ = static_cast<int>(config.blockDim.x * config.blockDim.y * config.blockDim.z);
    num_blocks_left_ = uint64_t{config.gridDim.x} * config.gridDim.y * config.gridDim.z;
    num_blocks_ = num_blocks_left_;
    dynamic_shared_bytes_ = config.dynamicSmemBytes;
    max_resident_blocks_ = options_.interleaves_blocks ? 2 + random_.next_below(11) : 1;
    first_block_ = random_.next() % num_blocks_;
    const uint64_t strides[] = {1, num_blocks_ - 1, 2 + random_.next() % num_blocks_};
    block_stride_ = strides[random_.next_below(3)];
    if (std::gcd(block_stride_, num_blocks_) != 1) block_stride_ = 1;
  }

  // Runs all blocks. Returns a description of the violated rule, or an empty string.
  std::string run() {
    while (error_.empty() && (num_blocks_left_ > 0 || !resident_blocks_.empty())) {
      while (num_blocks_left_ > 0 && resident_blocks_.size() < max_resident_blocks_) begin_block();
      run_one_thread();
    }
    return error_;
  }

  bool is_running() const { return current_thread_ != nullptr; }
  Thread& current_thread() { return *current_thread_; }
  // Null if accesses are not checked.
  AccessChecker* access_checker() { return options_.checks_accesses ? &access_checker_ : nullptr; }
  bool interleaves_blocks() const { return options_.interleaves_blocks; }
  bool flip_coin() { return random_.next_below(2) != 0; }
  bool draw_one_in_64() { return random_.next_below(64) == 0; }

  // Suspends the running thread; it resumes when its block is scheduled again.
  void suspend() { Context::switch_to(current_thread_->context, scheduler_); }

  void yield_to_others() {
    current_thread_->block->runnable_threads.push_back(current_thread_->index_in_block);
    suspend();
  }

  // Delays the running block, sometimes so long that other blocks pass the same atomic operation first.
  void delay_block() {
    current_thread_->block->delayed_until_step = num_steps_ + (1ull << random_.next_below(16));
    yield_to_others();
  }

  void stop_with_error(std::string message) {
    error_ = std::move(message);
    suspend();  // never resumes, because run() stops at an error
  }

  void run_thread() {
    thread_function_(thread_argument_);
    apply_delayed_atomics_after_delay();
    Block& block = *current_thread_->block;
    current_thread_->state = ThreadState::kDone;
    block.running_lanes[static_cast<size_t>(current_thread_->warp())] &= ~(1u << current_thread_->lane());
    --block.num_running;
    suspend();
  }

  // Makes those of `count` threads runnable whose state is `waiting_state` and whose lane is in the mask `lanes`.
  void wake_threads(Block& block, int first, int count, ThreadState waiting_state, uint32_t lanes) {
    for (int i = 0; i < count; ++i) {
      const int index = first + (thread_order_ == 1 ? i : count - 1 - i);
      if ((lanes >> index % kWarpSize & 1u) == 0) continue;
      Thread& thread = block.threads[static_cast<size_t>(index)];
      if (thread.state != waiting_state) continue;
      thread.state = ThreadState::kRunnable;
      block.runnable_threads.push_back(index);
    }
  }

  void apply_delayed_atomics(Thread& thread) {
    for (const DelayedAtomic& atomic : thread.delayed_atomics) atomic.apply(atomic.address, atomic.operand);
    thread.delayed_atomics.clear();
  }

  // Applies the delayed atomics before a barrier, a __syncwarp or the exit. Before that, other threads run for a random
  // time: barriers only order accesses within the block, so other blocks may see the atomics much later.
  void apply_delayed_atomics_after_delay() {
    while (!current_thread_->delayed_atomics.empty() && random_.next_below(8) != 0) yield_to_others();
    apply_delayed_atomics(*current_thread_);
  }

  char* dynamic_shared_begin() const {
    return reinterpret_cast<char*>(current_thread_->block->dynamic_memory.data()) + kSharedMargin;
  }

  // The offset of the dynamic part in a block's shared memory.
  size_t dynamic_shared_offset() const { return (shared_memory_.bytes() + 15) / 16 * 16; }

  // Returns the offset of an address in the shared memory of the running block, of which the dynamic part comes last;
  // kGlobal if it is not in shared memory, and kOutside if it is within the margin.
  static constexpr size_t kGlobal = SIZE_MAX, kOutside = SIZE_MAX - 1;
  size_t find_shared_offset(const void* address) const {
    const auto* const byte = static_cast<const char*>(address);
    if (shared_memory_.contains(address)) return static_cast<size_t>(byte - shared_memory_.begin);
    const std::ptrdiff_t offset = byte - dynamic_shared_begin();
    const auto margin = static_cast<std::ptrdiff_t>(kSharedMargin),
               size = static_cast<std::ptrdiff_t>(dynamic_shared_bytes_);
    if (offset < -margin || offset >= size + margin) return kGlobal;
    return offset < 0 || offset >= size ? kOutside : dynamic_shared_offset() + static_cast<size_t>(offset);
  }

  bool is_in_stack_guard(const void* address) const {
    return current_thread_ != nullptr && current_thread_->stack != nullptr &&
           current_thread_->stack->is_in_guard_page(address);
  }

 private:
  void begin_block() {
    const uint64_t index =
        (first_block_ + (num_blocks_ - num_blocks_left_) % num_blocks_ * block_stride_) % num_blocks_;
    --num_blocks_left_;
    auto block = std::make_unique<Block>();
    block->index = {static_cast<unsigned>(index % gridDim.x), static_cast<unsigned>(index / gridDim.x % gridDim.y),
                    static_cast<unsigned>(index / gridDim.x / gridDim.y)};
    block->threads.resize(static_cast<size_t>(num_threads_));
    block->num_running = num_threads_;
    block->num_at_barrier = 0;
    const auto num_warps = static_cast<size_t>((num_threads_ + kWarpSize - 1) / kWarpSize);
    block->waiting_lanes.assign(num_warps, 0);
    block->running_lanes.assign(num_warps, 0);
    // The initial contents are arbitrary.
    block->shared_memory.assign(shared_memory_.bytes(), static_cast<char>(random_.next()));
    for (int i = 0; i < num_threads_; ++i) {
      Thread& thread = block->threads[static_cast<size_t>(i)];
      const auto n = static_cast<unsigned>(i);
      thread.block = block.get();
      thread.index_in_block = i;
      thread.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
      thread.state = ThreadState::kAtBarrier;  // wake_threads() below makes the threads runnable
      block->running_lanes[static_cast<size_t>(thread.warp())] |= 1u << thread.lane();
    }
    int4 any_value;
    std::memset(&any_value, static_cast<char>(random_.next()), sizeof any_value);
    block->dynamic_memory.assign((dynamic_shared_bytes_ + 2 * kSharedMargin) / sizeof any_value + 1, any_value);
    if (options_.checks_accesses) access_checker_.begin_block(*block, dynamic_shared_offset() + dynamic_shared_bytes_);
    wake_threads(*block, 0, num_threads_, ThreadState::kAtBarrier, ~0u);
    resident_blocks_.push_back(std::move(block));
  }

  // Runs one thread until it yields.
  void run_one_thread() {
    ++num_steps_;
    if (next_block_ >= resident_blocks_.size() || !is_ready(*resident_blocks_[next_block_]) ||
        random_.next_below(4) == 0)
      choose_block();
    if (!error_.empty()) return;
    Block& block = *resident_blocks_[next_block_];
    auto& runnable = block.runnable_threads;
    if (thread_order_ >= 2) std::swap(runnable[random_.next_below(runnable.size())], runnable.back());
    Thread& thread = block.threads[static_cast<size_t>(runnable.back())];
    runnable.pop_back();
    resume_thread(thread);
    if (error_.empty() && block.num_running == 0) end_block();
  }

  bool is_ready(const Block& block) const {
    return !block.runnable_threads.empty() && block.delayed_until_step <= num_steps_;
  }

  void choose_block() {
    const size_t first = random_.next_below(resident_blocks_.size());
    const auto choose_block_that = [&](const auto& is_suitable) {
      for (size_t i = 0; i < resident_blocks_.size(); ++i) {
        next_block_ = (first + i) % resident_blocks_.size();
        if (is_suitable(*resident_blocks_[next_block_])) return true;
      }
      return false;
    };
    if (choose_block_that([&](const Block& block) { return is_ready(block); })) return;
    if (choose_block_that([](const Block& block) { return !block.runnable_threads.empty(); })) return;
    error_ = "deadlock: " + describe_waiting_threads(*resident_blocks_[next_block_]);
  }

  void resume_thread(Thread& thread) {
    if (section_block_ != thread.block && shared_memory_.bytes() > 0) {
      if (section_block_ != nullptr) section_block_->shared_memory.assign(shared_memory_.begin, shared_memory_.end);
      std::memcpy(shared_memory_.begin, thread.block->shared_memory.data(), shared_memory_.bytes());
    }
    section_block_ = thread.block;
    if (thread.stack == nullptr) {
      if (free_stacks_.empty()) free_stacks_.push_back(std::make_unique<Stack>());
      thread.stack = std::move(free_stacks_.back());
      free_stacks_.pop_back();
      thread.context.prepare(*thread.stack, enter_thread);
    }
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    current_thread_ = &thread;
    Context::switch_to(scheduler_, thread.context);
    current_thread_ = nullptr;
    if (thread.state == ThreadState::kDone || !error_.empty()) free_stacks_.push_back(std::move(thread.stack));
    if (thread.state == ThreadState::kDone) open_barrier_if_complete(*thread.block);
  }

  void end_block() {
    section_block_ = nullptr;
    resident_blocks_.erase(resident_blocks_.begin() + static_cast<std::ptrdiff_t>(next_block_));
  }

 public:
  // Opens the block's barrier if all threads that have not left the kernel wait at the barrier.
  void open_barrier_if_complete(Block& block) {
    if (block.num_at_barrier == 0 || block.num_at_barrier != block.num_running) return;
    const Thread* first = nullptr;
    for (const Thread& t : block.threads) {
      if (t.state != ThreadState::kAtBarrier) continue;
      if (first == nullptr) first = &t;
      if (t.call_site.line != first->call_site.line || std::strcmp(t.call_site.file, first->call_site.file) != 0) {
        error_ = "divergent barriers: " + describe(*first) + " waits at " + describe(first->call_site) + ", " +
                 describe(t) + " at " + describe(t.call_site);
        return;
      }
    }
    block.num_at_barrier = 0;
    if (barrier_random_.next_below(2) != 0) swap_registered_buffers();  // as if another stream wrote to one of them
    if (options_.checks_accesses) access_checker_.record_barrier(block);
    wake_threads(block, 0, num_threads_, ThreadState::kAtBarrier, ~0u);
  }

 private:
  SharedMemory shared_memory_;
  void (*thread_function_)(void*);
  void* thread_argument_;
  SimulationOptions options_;
  Random random_;
  Random barrier_random_;  // separate from random_, so that swaps at barriers do not change the schedule
  AccessChecker access_checker_{random_};
  uint32_t thread_order_;  // order of the threads. 0: ascending, 1: descending, else random
  size_t max_resident_blocks_;
  uint64_t first_block_,
      block_stride_;  // in linear block indices: the first block to begin, and the distance to the next one
  int num_threads_;
  size_t dynamic_shared_bytes_;
  uint64_t num_blocks_;
  uint64_t num_blocks_left_;
  std::vector<std::unique_ptr<Block>> resident_blocks_;
  size_t next_block_ = 0;  // index in resident_blocks_ of the block that runs next
  uint64_t num_steps_ = 0;
  Block* section_block_ = nullptr;  // the block whose shared memory is in the linker section
  Thread* current_thread_ = nullptr;
  Context scheduler_;
  std::string error_;
  static std::vector<std::unique_ptr<Stack>> free_stacks_;  // free stacks, kept for the next launch
};

std::vector<std::unique_ptr<Stack>> Grid::free_stacks_;

void enter_thread() {
  grid->run_thread();
  __builtin_unreachable();
}

// While an object exists, a hardware fault inside a kernel ends the launch, not the process.
class FaultHandlers {
 public:
  FaultHandlers() {
    static char memory[1 << 16];
    stack_t stack{};
    stack.ss_sp = memory;
    stack.ss_size = sizeof memory;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = &on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &old_actions_[i]);
  }
  ~FaultHandlers() {
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &old_actions_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static void on_fault(int signal, siginfo_t* info, void*) {
    if (signal == SIGFPE) fail_launch("divided by zero, or the quotient does not fit the type");
    if (grid->is_in_stack_guard(info->si_addr)) fail_launch("the thread's stack is exhausted");
    fail_launch(format_text("accessed memory at %p, which is not mapped or is read-only", info->si_addr));
  }

  static constexpr size_t kCount = 3;
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old_actions_[kCount];
  stack_t old_stack_{};
};

std::mutex launch_mutex;

}  // namespace

int Block::num_lanes_of_warp(int warp) const {
  return std::min(kWarpSize, static_cast<int>(threads.size()) - first_thread_of_warp(warp));
}

void fail_launch(const std::string& message) {
  grid->stop_with_error(describe(grid->current_thread()) + ": " + message);
  __builtin_unreachable();
}

void wait_at_barrier(CallSite site) {
  Thread& t = grid->current_thread();
  grid->apply_delayed_atomics_after_delay();
  t.call_site = site;
  t.state = ThreadState::kAtBarrier;
  ++t.block->num_at_barrier;
  grid->open_barrier_if_complete(*t.block);
  grid->suspend();
}

uint64_t run_collective(Collective collective, uint32_t mask, uint64_t value, int operand, CallSite site) {
  Thread& t = grid->current_thread();
  t.collective = collective;
  t.mask = mask;
  t.value = value;
  t.operand = operand;
  t.call_site = site;
  if ((mask >> t.lane() & 1u) == 0) {
    fail_launch(format_text("%s at %s with mask %08x, which does not contain the calling lane", get_name(collective),
                            describe(site).c_str(), mask));
  }
  if (collective == Collective::kSync) grid->apply_delayed_atomics_after_delay();
  t.state = ThreadState::kInCollective;
  uint32_t& waiting = t.block->waiting_lanes[static_cast<size_t>(t.warp())];
  waiting |= 1u << t.lane();
  std::string error;
  try {
    if (finish_collective_if_complete(*t.block, t)) {
      waiting &= ~mask;
      if (collective == Collective::kSync && grid->access_checker() != nullptr)
        grid->access_checker()->record_syncwarp(*t.block, t.warp(), mask);
      grid->wake_threads(*t.block, t.block->first_thread_of_warp(t.warp()), t.block->num_lanes_of_warp(t.warp()),
                         ThreadState::kInCollective, mask);
    }
  } catch (const Violation& violation) {
    error = violation.message;
  }
  if (!error.empty()) grid->stop_with_error(error);
  grid->suspend();
  return t.value;
}

namespace {

void check_atomic(void* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) {
    fail_launch(format_text("an atomic of %d bytes at %p, which is not aligned", bytes, address));
  }
  const std::string error = check_access(address, static_cast<size_t>(bytes), Access::kAtomic);
  if (!error.empty()) fail_launch(error);
}

}  // namespace

void check_constant_read(const void* address, int bytes) {
  const std::string error = check_access(const_cast<void*>(address), static_cast<size_t>(bytes), Access::kConstantRead);
  if (!error.empty()) fail_launch(error);
}

uint64_t apply_atomic(void* address, int bytes, AtomicFunction apply, uint64_t operand, AtomicOrder order) {
  check_atomic(address, bytes);
  if (grid->interleaves_blocks() && grid->flip_coin()) grid->delay_block();
  Thread& t = grid->current_thread();
  if (order.releases) grid->apply_delayed_atomics(t);
  // The thread's earlier operations on this address take effect first; those on other addresses may stay delayed.
  for (size_t i = 0; i < t.delayed_atomics.size(); ++i) {
    if (t.delayed_atomics[i].address != address) continue;
    t.delayed_atomics[i].apply(address, t.delayed_atomics[i].operand);
    t.delayed_atomics.erase(t.delayed_atomics.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  if (grid->access_checker() != nullptr)
    grid->access_checker()->record_atomic_order(t, reinterpret_cast<uintptr_t>(address), order);
  return apply(address, operand);
}

void apply_atomic_without_result(void* address, int bytes, AtomicFunction apply, uint64_t operand) {
  check_atomic(address, bytes);
  if (!grid->interleaves_blocks()) {
    apply(address, operand);
    return;
  }
  grid->current_thread().delayed_atomics.push_back({address, apply, operand});
  if (grid->flip_coin()) grid->yield_to_others();
}

bool is_in_kernel() { return grid != nullptr && grid->is_running(); }

std::string check_access(void* address, size_t bytes, Access access) {
  if (!is_in_kernel() || grid->access_checker() == nullptr || grid->current_thread().stack->contains(address))
    return {};
  const size_t shared_offset = grid->find_shared_offset(address);
  if (shared_offset == Grid::kOutside)
    return format_text("%zu bytes at %p, next to the dynamic shared memory", bytes, address);
  // No barrier prevents that other threads run before a read of global memory.
  if (access == Access::kRead && shared_offset == Grid::kGlobal && grid->interleaves_blocks() && grid->draw_one_in_64())
    grid->yield_to_others();
  try {
    grid->access_checker()->check_access(grid->current_thread(), reinterpret_cast<uintptr_t>(address), bytes, access,
                                         shared_offset);
  } catch (const Violation& violation) {
    return violation.message;
  }
  return {};
}

void* get_dynamic_shared_memory() { return grid->dynamic_shared_begin(); }

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, SharedMemory shared_memory,
                   void (*run_thread)(void*), void* argument) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  const dim3 &g = config.gridDim, &b = config.blockDim;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || b.x == 0 || b.y == 0 ||
      b.z == 0 || b.z > 64 || uint64_t{b.x} * b.y * b.z > 1024 ||
      config.dynamicSmemBytes > max_dynamic_shared_bytes(kernel)) {
    return set_error(cudaErrorInvalidConfiguration, "invalid configuration argument");
  }
  if (const cudaError_t error = check_launch(config.stream); error != cudaSuccess) return error;
  gridDim = g;
  blockDim = b;
  Grid new_grid(config, shared_memory, run_thread, argument, options(), take_next_seed());
  grid = &new_grid;
  std::string error;
  {
    const FaultHandlers handlers;
    error = new_grid.run();
  }
  grid = nullptr;
  return error.empty() ? cudaSuccess : set_error(cudaErrorLaunchFailure, error);
}

}  // namespace twin
