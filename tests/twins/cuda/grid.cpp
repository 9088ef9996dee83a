#include "grid.h"

#include <algorithm>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <numeric>
#include <unordered_map>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

// The linker defines these symbols at the ends of the section; they are null if no kernel has shared memory.
extern char shared_begin[] __asm__("__start_" NGRAM_TWIN_SHARED_SECTION) __attribute__((weak));
extern char shared_end[] __asm__("__stop_" NGRAM_TWIN_SHARED_SECTION) __attribute__((weak));

namespace twin {

// Messages.

static uint32_t get_running_lanes(const Block& block, int warp) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < block.lanes_of_warp(warp); ++lane) {
    const auto number = static_cast<size_t>(block.first_of_warp(warp) + lane);
    if (block.threads[number].state != State::kDone) lanes |= 1u << lane;
  }
  return lanes;
}

std::string place_of(const Thread& thread) {
  const uint3 block = thread.block->index;
  return format_text("thread %d of block (%u, %u, %u)", thread.index_in_block, block.x, block.y, block.z);
}

std::string place_of(const Site& site) {
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

std::string describe_waiting(const Block& block) {
  std::string text;
  int shown = 0;
  const Thread* before = nullptr;
  for (const Thread& t : block.threads) {
    if (t.state == State::kDone) continue;
    const bool same =
        before != nullptr && before->state == t.state && before->site.line == t.site.line && before->mask == t.mask;
    before = &t;
    if (same) continue;
    if (++shown > 4) return text + "; ...";
    text += (text.empty() ? "" : "; ") + place_of(t) + " waits ";
    if (t.state == State::kAtBarrier) {
      text += "at the barrier of " + place_of(t.site);
    } else {
      text += format_text("in %s at %s for the lanes %08x, of which %08x have left the kernel", name_of(t.collective),
                          place_of(t.site).c_str(), t.mask, t.mask & ~get_running_lanes(block, t.warp()));
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
    throw Violation{format_text("%s at %s by %d lanes", name_of(t.collective), place_of(t.site).c_str(), t.operand)};
  }
  const int source = get_source_lane(t);
  if ((t.mask >> source & 1u) == 0) {
    throw Violation{format_text("%s at %s: %s reads lane %d, which is not in the mask %08x", name_of(t.collective),
                                place_of(t.site).c_str(), place_of(t).c_str(), source, t.mask)};
  }
  return lanes[source].value;
}

uint64_t compute_result(const Thread* lanes, const Thread& t) {
  uint32_t lanes_true = 0;
  uint64_t maximum = 0;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((t.mask >> lane & 1u) == 0) continue;
    if (lanes[lane].value != 0) lanes_true |= 1u << lane;
    maximum = std::max(maximum, lanes[lane].value);
  }
  switch (t.collective) {
    case Collective::kSync: return 0;
    case Collective::kShuffle:
    case Collective::kShuffleUp: return shuffle(lanes, t);
    case Collective::kBallot: return lanes_true;
    case Collective::kAny: return lanes_true != 0;
    case Collective::kMax: return maximum;
  }
  return 0;
}

}  // namespace

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kSync: return "__syncwarp";
    case Collective::kShuffle: return "__shfl_sync";
    case Collective::kShuffleUp: return "__shfl_up_sync";
    case Collective::kBallot: return "__ballot_sync";
    case Collective::kAny: return "__any_sync";
    default: return "__reduce_max_sync";
  }
}

bool finish_collective_if_complete(Block& block, const Thread& last) {
  const int warp = last.warp();
  Thread* lanes = &block.threads[static_cast<size_t>(block.first_of_warp(warp))];
  const int count = block.lanes_of_warp(warp);
  const uint32_t mask = last.mask;
  const uint32_t waiting = block.in_collective[static_cast<size_t>(warp)];
  bool is_complete = (waiting & mask) == mask;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    if (lane >= count || lanes[lane].state == State::kDone) {
      throw Violation{format_text("%s at %s: the mask %08x of %s names lane %d, which %s", name_of(last.collective),
                                  place_of(last.site).c_str(), mask, place_of(last).c_str(), lane,
                                  lane >= count ? "the block does not have" : "has left the kernel")};
    }
    if ((waiting >> lane & 1u) == 0) continue;
    const Thread& other = lanes[lane];
    if (other.mask == mask && other.collective == last.collective) continue;
    is_complete = false;
    if ((other.mask >> last.lane() & 1u) != 0) {  // both lanes wait for each other in different collectives
      throw Violation{format_text("%s waits in %s at %s with mask %08x, %s in %s at %s with mask %08x",
                                  place_of(last).c_str(), name_of(last.collective), place_of(last.site).c_str(), mask,
                                  place_of(other).c_str(), name_of(other.collective), place_of(other.site).c_str(),
                                  other.mask)};
    }
  }
  if (!is_complete) return false;
  uint64_t results[kWarpSize];
  for (int lane = 0; lane < count; ++lane) {
    if ((mask >> lane & 1u) != 0) results[lane] = compute_result(lanes, lanes[lane]);
  }
  for (int lane = 0; lane < count; ++lane) {
    if ((mask >> lane & 1u) != 0) lanes[lane].value = results[lane];
  }
  return true;
}

namespace {

class Grid;
Grid* grid = nullptr;  // the running launch

size_t shared_bytes() { return static_cast<size_t>(shared_end - shared_begin); }

void enter_thread();

class Grid {
 public:
  Grid(const cudaLaunchConfig_t& config, void (*thread)(void*), void* context, const SimulationOptions& options,
       uint64_t seed)
      : thread_(thread),
        context_(context),
        options_(options),
        random_(seed),
        barriers_(seed),
        order_(random_.below(4)) {
    num_threads_ = static_cast<int>(config.blockDim.x * config.blockDim.y * config.blockDim.z);
    blocks_left_ = uint64_t{config.gridDim.x} * config.gridDim.y * config.gridDim.z;
    num_blocks_ = blocks_left_;
    max_resident_ = options_.interleaves_blocks ? 2 + random_.below(11) : 1;
    first_ = random_.next() % num_blocks_;
    const uint64_t strides[] = {1, num_blocks_ - 1, 2 + random_.next() % num_blocks_};
    stride_ = strides[random_.below(3)];
    if (std::gcd(stride_, num_blocks_) != 1) stride_ = 1;
  }

  // Runs all blocks. Returns a description of the violated rule, or an empty string.
  std::string run() {
    while (violation_.empty() && (blocks_left_ > 0 || !resident_.empty())) {
      while (blocks_left_ > 0 && resident_.size() < max_resident_) begin_block();
      step();
    }
    block_overlap_counts().launches_sharing_a_word += shared_a_word_;
    block_overlap_counts().launches_with_overlap += blocks_overlapped_;
    return violation_;
  }

  bool running() const { return current_ != nullptr; }
  Thread& current() { return *current_; }
  Watch* watch() { return options_.checks_accesses ? &watch_ : nullptr; }
  bool interleaves_blocks() const { return options_.interleaves_blocks; }
  bool flip_coin() { return random_.below(2) != 0; }
  bool one_in_64() { return random_.below(64) == 0; }

  // Suspends the running thread; it resumes when its block is scheduled again.
  void suspend() { Context::switch_to(current_->context, scheduler_); }

  void yield_to_others() {
    current_->block->runnable.push_back(current_->index_in_block);
    suspend();
  }

  // Delays the running block, sometimes long enough for other blocks to reach the same word and pass it.
  void delay_block() {
    current_->block->delayed_until_step = steps_ + (1ull << random_.below(16));
    yield_to_others();
  }

  void fail(std::string what) {
    violation_ = std::move(what);
    suspend();  // never resumes, because run() stops at a violation
  }

  void run_thread() {
    thread_(context_);
    finish_atomics_after_delay();
    current_->state = State::kDone;
    --current_->block->num_running;
    suspend();
  }

  void wake(Block& block, int first, int count, State waiting, uint32_t lanes) {
    // The last thread in `runnable` runs first.
    for (int i = 0; i < count; ++i) {
      const int number = first + (order_ == 1 ? i : count - 1 - i);
      if ((lanes >> number % kWarpSize & 1u) == 0) continue;
      Thread& thread = block.threads[static_cast<size_t>(number)];
      if (thread.state != waiting) continue;
      thread.state = State::kRunnable;
      block.runnable.push_back(number);
    }
  }

  // Records that the running block applies an atomic operation to a word, and whether blocks share the word.
  void record_atomic(const void* address) {
    const uint64_t block_number = current_->block->number;
    const auto [last, is_first] = last_atomic_block_.try_emplace(address, block_number);
    if (is_first || last->second == block_number) return;
    shared_a_word_ = true;
    for (const auto& block : resident_) blocks_overlapped_ = blocks_overlapped_ || block->number == last->second;
    last->second = block_number;
  }

  void finish_atomics(Thread& thread) {
    for (const DelayedAtomic& late : thread.delayed_atomics) late.apply(late.address, late.operand);
    thread.delayed_atomics.clear();
  }

  // Applies the delayed atomics before a barrier, a __syncwarp or the exit. They may stay invisible to other blocks for
  // a long time, because these operations only order accesses within the block.
  void finish_atomics_after_delay() {
    while (!current_->delayed_atomics.empty() && random_.below(8) != 0) yield_to_others();
    finish_atomics(*current_);
  }

  bool on_stack_guard(const void* address) const {
    return current_ != nullptr && current_->stack != nullptr && current_->stack->is_in_guard_page(address);
  }

 private:
  void begin_block() {
    const uint64_t number = (first_ + (num_blocks_ - blocks_left_) % num_blocks_ * stride_) % num_blocks_;
    --blocks_left_;
    auto block = std::make_unique<Block>();
    block->number = number;
    block->index = {static_cast<unsigned>(number % gridDim.x), static_cast<unsigned>(number / gridDim.x % gridDim.y),
                    static_cast<unsigned>(number / gridDim.x / gridDim.y)};
    block->threads.resize(static_cast<size_t>(num_threads_));
    block->num_running = num_threads_;
    block->num_at_barrier = 0;
    block->in_collective.assign(static_cast<size_t>((num_threads_ + kWarpSize - 1) / kWarpSize), 0);
    block->shared.assign(shared_bytes(), static_cast<char>(random_.next()));  // arbitrary initial contents
    for (int i = 0; i < num_threads_; ++i) {
      Thread& thread = block->threads[static_cast<size_t>(i)];
      const auto n = static_cast<unsigned>(i);
      thread.block = block.get();
      thread.index_in_block = i;
      thread.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
      thread.state = State::kAtBarrier;  // wake() below makes the threads runnable
    }
    if (options_.checks_accesses) watch_.begin_block(*block, shared_bytes());
    wake(*block, 0, num_threads_, State::kAtBarrier, ~0u);
    resident_.push_back(std::move(block));
  }

  // Runs one thread until it yields.
  void step() {
    ++steps_;
    if (next_ >= resident_.size() || !is_ready(*resident_[next_]) || random_.below(4) == 0) choose_block();
    if (!violation_.empty()) return;
    Block& block = *resident_[next_];
    auto& runnable = block.runnable;
    if (order_ >= 2) std::swap(runnable[random_.below(runnable.size())], runnable.back());
    Thread& thread = block.threads[static_cast<size_t>(runnable.back())];
    runnable.pop_back();
    resume(thread);
    if (violation_.empty() && block.num_running == 0) end_block();
  }

  bool is_ready(const Block& block) const { return !block.runnable.empty() && block.delayed_until_step <= steps_; }

  void choose_block() {
    const size_t first = random_.below(resident_.size());
    const auto choose = [&](const auto& suits) {
      for (size_t i = 0; i < resident_.size(); ++i) {
        next_ = (first + i) % resident_.size();
        if (suits(*resident_[next_])) return true;
      }
      return false;
    };
    if (choose([&](const Block& block) { return is_ready(block); })) return;
    if (choose([](const Block& block) { return !block.runnable.empty(); })) return;
    violation_ = "deadlock: " + describe_waiting(*resident_[next_]);
  }

  void resume(Thread& thread) {
    if (section_block_ != thread.block && shared_bytes() > 0) {
      if (section_block_ != nullptr) section_block_->shared.assign(shared_begin, shared_end);
      std::memcpy(shared_begin, thread.block->shared.data(), shared_bytes());
    }
    section_block_ = thread.block;
    if (thread.stack == nullptr) {
      if (stacks_.empty()) stacks_.push_back(std::make_unique<Stack>());
      thread.stack = std::move(stacks_.back());
      stacks_.pop_back();
      thread.context.begin(*thread.stack, enter_thread);
    }
    threadIdx = thread.index;
    blockIdx = thread.block->index;
    current_ = &thread;
    Context::switch_to(scheduler_, thread.context);
    current_ = nullptr;
    if (thread.state == State::kDone || !violation_.empty()) stacks_.push_back(std::move(thread.stack));
    if (thread.state == State::kDone) open_barrier_if_complete(*thread.block);
  }

  void end_block() {
    section_block_ = nullptr;
    resident_.erase(resident_.begin() + static_cast<std::ptrdiff_t>(next_));
  }

 public:
  // Opens the block's barrier once every thread that has not left the kernel waits there.
  void open_barrier_if_complete(Block& block) {
    if (block.num_at_barrier == 0 || block.num_at_barrier != block.num_running) return;
    const Thread* first = nullptr;
    for (const Thread& t : block.threads) {
      if (t.state != State::kAtBarrier) continue;
      if (first == nullptr) first = &t;
      if (t.site.line != first->site.line || std::strcmp(t.site.file, first->site.file) != 0) {
        violation_ = "divergent barriers: " + place_of(*first) + " waits at " + place_of(first->site) + ", " +
                     place_of(t) + " at " + place_of(t.site);
        return;
      }
    }
    block.num_at_barrier = 0;
    if (barriers_.below(2) != 0) swap_registered_buffers();
    if (options_.checks_accesses) watch_.barrier(block);
    wake(block, 0, num_threads_, State::kAtBarrier, ~0u);
  }

 private:
  void (*thread_)(void*);
  void* context_;
  SimulationOptions options_;
  Random random_;
  Random barriers_;  // separate from random_, so that swaps at barriers do not change the schedule
  Watch watch_{random_};
  uint32_t order_;           // order of the threads. 0: ascending, 1: descending, else random
  size_t max_resident_;      // maximum number of resident blocks
  uint64_t first_, stride_;  // blocks start at number first_ and advance by stride_ round the grid
  int num_threads_;
  uint64_t num_blocks_;
  uint64_t blocks_left_;
  std::vector<std::unique_ptr<Block>> resident_;
  size_t next_ = 0;
  uint64_t steps_ = 0;
  Block* section_block_ = nullptr;
  Thread* current_ = nullptr;
  Context scheduler_;
  std::string violation_;
  std::unordered_map<const void*, uint64_t> last_atomic_block_;
  bool shared_a_word_ = false, blocks_overlapped_ = false;
  static std::vector<std::unique_ptr<Stack>> stacks_;  // free stacks, kept for the next launch
};

std::vector<std::unique_ptr<Stack>> Grid::stacks_;

void enter_thread() {
  grid->run_thread();
  __builtin_unreachable();
}

// A fault inside a kernel ends the launch, not the process.
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
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &action, &old_[i]);
  }
  ~FaultHandlers() {
    for (size_t i = 0; i < kCount; ++i) sigaction(kSignals[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static void on_fault(int signal, siginfo_t* info, void*) {
    if (signal == SIGFPE) violation("divided by zero, or the quotient does not fit");
    if (grid->on_stack_guard(info->si_addr)) violation("its stack is exhausted");
    violation(format_text("touched memory at %p, which it may not", info->si_addr));
  }

  static constexpr size_t kCount = 3;
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old_[kCount];
  stack_t old_stack_{};
};

std::mutex launch_mutex;

}  // namespace

int Block::lanes_of_warp(int warp) const {
  return std::min(kWarpSize, static_cast<int>(threads.size()) - first_of_warp(warp));
}

void violation(const std::string& what) {
  grid->fail(place_of(grid->current()) + ": " + what);
  __builtin_unreachable();
}

void barrier(Site site) {
  Thread& t = grid->current();
  grid->finish_atomics_after_delay();
  t.site = site;
  t.state = State::kAtBarrier;
  ++t.block->num_at_barrier;
  grid->open_barrier_if_complete(*t.block);
  grid->suspend();
}

uint64_t collective(Collective kind, uint32_t mask, uint64_t value, int operand, Site site) {
  Thread& t = grid->current();
  t.collective = kind;
  t.mask = mask;
  t.value = value;
  t.operand = operand;
  t.site = site;
  if ((mask >> t.lane() & 1u) == 0) {
    violation(
        format_text("%s at %s with mask %08x, without its own lane", name_of(kind), place_of(site).c_str(), mask));
  }
  if (kind == Collective::kSync) grid->finish_atomics_after_delay();
  t.state = State::kInCollective;
  uint32_t& waiting = t.block->in_collective[static_cast<size_t>(t.warp())];
  waiting |= 1u << t.lane();
  std::string error;
  try {
    if (finish_collective_if_complete(*t.block, t)) {
      waiting &= ~mask;
      if (kind == Collective::kSync && grid->watch() != nullptr) grid->watch()->syncwarp(*t.block, t.warp(), mask);
      grid->wake(*t.block, t.block->first_of_warp(t.warp()), t.block->lanes_of_warp(t.warp()), State::kInCollective,
                 mask);
    }
  } catch (const Violation& what) {
    error = what.what;
  }
  if (!error.empty()) grid->fail(error);
  grid->suspend();
  return t.value;
}

namespace {

void check_atomic(void* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) {
    violation(format_text("an atomic of %d bytes at %p, which is not aligned", bytes, address));
  }
  const std::string error = check_access(address, static_cast<size_t>(bytes), Access::kAtomicWrite);
  if (!error.empty()) violation(error);
  const bool is_shared = address >= shared_begin && address < shared_end;
  if (grid->interleaves_blocks() && !is_shared) grid->record_atomic(address);
}

}  // namespace

void read_constant(const void* address, int bytes) {
  const std::string error = check_access(const_cast<void*>(address), static_cast<size_t>(bytes), Access::kConstantRead);
  if (!error.empty()) violation(error);
}

uint64_t atomic(void* address, int bytes, Apply apply, uint64_t operand, Ordering order) {
  check_atomic(address, bytes);
  if (grid->interleaves_blocks() && grid->flip_coin()) grid->delay_block();
  Thread& t = grid->current();
  if (order.releases) grid->finish_atomics(t);
  // The thread's earlier operations on this address take effect first; those on other addresses may stay delayed.
  for (size_t i = 0; i < t.delayed_atomics.size(); ++i) {
    if (t.delayed_atomics[i].address != address) continue;
    t.delayed_atomics[i].apply(address, t.delayed_atomics[i].operand);
    t.delayed_atomics.erase(t.delayed_atomics.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  if (grid->watch() != nullptr) grid->watch()->pass_on(t, reinterpret_cast<uintptr_t>(address), order);
  return apply(address, operand);
}

void atomic_without_result(void* address, int bytes, Apply apply, uint64_t operand) {
  check_atomic(address, bytes);
  if (!grid->interleaves_blocks()) {
    apply(address, operand);
    return;
  }
  grid->current().delayed_atomics.push_back({address, apply, operand});
  if (grid->flip_coin()) grid->yield_to_others();
}

bool in_kernel() { return grid != nullptr && grid->running(); }

std::string check_access(void* address, size_t bytes, Access access) {
  if (!in_kernel() || grid->watch() == nullptr || grid->current().stack->contains(address)) return {};
  // Other threads may run before a volatile read, and before a plain read of global memory, which nothing orders.
  if (access == Access::kAtomicRead && grid->flip_coin()) grid->yield_to_others();
  const bool is_shared = address >= shared_begin && address < shared_end;
  if (access == Access::kRead && !is_shared && grid->interleaves_blocks() && grid->one_in_64()) grid->yield_to_others();
  try {
    grid->watch()->access(grid->current(), reinterpret_cast<uintptr_t>(address), bytes, access,
                          reinterpret_cast<uintptr_t>(shared_begin), shared_bytes());
  } catch (const Violation& error) {
    return error.what;
  }
  return {};
}

cudaError_t launch(const cudaLaunchConfig_t& config, void (*thread)(void*), void* context) {
  const std::lock_guard<std::mutex> lock(launch_mutex);
  const dim3 &g = config.gridDim, &b = config.blockDim;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || b.x == 0 || b.y == 0 ||
      b.z == 0 || b.z > 64 || uint64_t{b.x} * b.y * b.z > 1024 || config.dynamicSmemBytes != 0) {
    return set_error(cudaErrorInvalidConfiguration, "invalid configuration argument");
  }
  if (take_requested_failure())
    return set_error(cudaErrorLaunchOutOfResources, "too many resources requested for launch");
  record_stream(config.stream);
  gridDim = g;
  blockDim = b;
  Grid new_grid(config, thread, context, options(), next_seed());
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
