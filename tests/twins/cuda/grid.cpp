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

// The linker's names for the section's ends; absent if no kernel has shared memory.
extern char shared_begin[] __asm__("__start_" NGRAM_TWIN_SHARED_SECTION) __attribute__((weak));
extern char shared_end[] __asm__("__stop_" NGRAM_TWIN_SHARED_SECTION) __attribute__((weak));

namespace twin {

// Messages.

static uint32_t lanes_that_run(const Block& block, int warp) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < block.lanes_of_warp(warp); ++lane) {
    const auto number = static_cast<size_t>(block.first_of_warp(warp) + lane);
    if (block.threads[number].state != State::kDone) lanes |= 1u << lane;
  }
  return lanes;
}

std::string place_of(const Thread& thread) {
  const uint3 block = thread.block->index;
  return text_of("thread %d of block (%u, %u, %u)", thread.number, block.x, block.y, block.z);
}

std::string place_of(const Site& site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name == nullptr ? site.file : name + 1) + ":" + std::to_string(site.line);
}

std::string text_of(const char* format, ...) {
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
      text += text_of("in %s at %s for the lanes %08x, of which %08x have left the kernel", name_of(t.collective),
                      place_of(t.site).c_str(), t.mask, t.mask & ~lanes_that_run(block, t.warp()));
    }
  }
  return text;
}

// Collective operations of a warp's lanes.

namespace {

// The lane that this one reads.
int source_of(const Thread& t) {
  if (t.collective == Collective::kShuffle) return t.operand & (kWarp - 1);
  return t.lane() < t.operand ? t.lane() : t.lane() - t.operand;
}

uint64_t shuffled(const Thread* lanes, const Thread& t) {
  if (t.operand < 0 && t.collective != Collective::kShuffle) {
    throw Violation{text_of("%s at %s by %d lanes", name_of(t.collective), place_of(t.site).c_str(), t.operand)};
  }
  const int source = source_of(t);
  if ((t.mask >> source & 1u) == 0) {
    throw Violation{text_of("%s at %s: %s reads lane %d, which is not in the mask %08x", name_of(t.collective),
                            place_of(t.site).c_str(), place_of(t).c_str(), source, t.mask)};
  }
  return lanes[source].value;
}

uint64_t result_for(const Thread* lanes, const Thread& t) {
  uint32_t lanes_true = 0;
  uint64_t most = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((t.mask >> lane & 1u) == 0) continue;
    if (lanes[lane].value != 0) lanes_true |= 1u << lane;
    most = std::max(most, lanes[lane].value);
  }
  switch (t.collective) {
    case Collective::kSync: return 0;
    case Collective::kShuffle:
    case Collective::kShuffleUp: return shuffled(lanes, t);
    case Collective::kBallot: return lanes_true;
    case Collective::kAny: return lanes_true != 0;
    case Collective::kMax: return most;
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

bool finish_collective(Block& block, const Thread& last) {
  const int warp = last.warp();
  Thread* lanes = &block.threads[static_cast<size_t>(block.first_of_warp(warp))];
  const int count = block.lanes_of_warp(warp);
  const uint32_t mask = last.mask;
  const uint32_t waiting = block.in_collective[static_cast<size_t>(warp)];
  bool all_here = (waiting & mask) == mask;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    if (lane >= count || lanes[lane].state == State::kDone) {
      throw Violation{text_of("%s at %s: the mask %08x of %s names lane %d, which %s", name_of(last.collective),
                              place_of(last.site).c_str(), mask, place_of(last).c_str(), lane,
                              lane >= count ? "the block does not have" : "has left the kernel")};
    }
    if ((waiting >> lane & 1u) == 0) continue;
    const Thread& other = lanes[lane];
    if (other.mask == mask && other.collective == last.collective) continue;
    all_here = false;
    if ((other.mask >> last.lane() & 1u) != 0) {  // neither can ever continue
      throw Violation{text_of("%s waits in %s at %s with mask %08x, %s in %s at %s with mask %08x",
                              place_of(last).c_str(), name_of(last.collective), place_of(last.site).c_str(), mask,
                              place_of(other).c_str(), name_of(other.collective), place_of(other.site).c_str(),
                              other.mask)};
    }
  }
  if (!all_here) return false;
  uint64_t results[kWarp];
  for (int lane = 0; lane < count; ++lane) {
    if ((mask >> lane & 1u) != 0) results[lane] = result_for(lanes, lanes[lane]);
  }
  for (int lane = 0; lane < count; ++lane) {
    if ((mask >> lane & 1u) != 0) lanes[lane].value = results[lane];
  }
  return true;
}

namespace {

class Grid;
Grid* grid = nullptr;  // of the launch under way

size_t shared_bytes() { return static_cast<size_t>(shared_end - shared_begin); }

void enter_thread();

class Grid {
 public:
  Grid(const cudaLaunchConfig_t& config, void (*thread)(void*), void* context, const Options& options, uint64_t seed)
      : thread_(thread),
        context_(context),
        options_(options),
        random_(seed),
        barriers_(seed),
        order_(random_.below(4)) {
    num_threads_ = static_cast<int>(config.blockDim.x * config.blockDim.y * config.blockDim.z);
    blocks_left_ = uint64_t{config.gridDim.x} * config.gridDim.y * config.gridDim.z;
    num_blocks_ = blocks_left_;
    window_ = options_.yields ? 2 + random_.below(11) : 1;
    first_ = random_.next() % num_blocks_;
    const uint64_t strides[] = {1, num_blocks_ - 1, 2 + random_.next() % num_blocks_};
    stride_ = strides[random_.below(3)];
    if (std::gcd(stride_, num_blocks_) != 1) stride_ = 1;
  }

  // Runs all blocks; returns the rule that was broken, or nothing.
  std::string run() {
    while (violation_.empty() && (blocks_left_ > 0 || !resident_.empty())) {
      while (blocks_left_ > 0 && resident_.size() < window_) begin_block();
      step();
    }
    meetings().launches += shared_a_word_;
    meetings().met += met_;
    return violation_;
  }

  bool running() const { return current_ != nullptr; }
  Thread& current() { return *current_; }
  Watch* watch() { return options_.watches ? &watch_ : nullptr; }
  bool yields() const { return options_.yields; }
  bool coin() { return random_.below(2) != 0; }
  bool one_in_64() { return random_.below(64) == 0; }

  // Suspends the running thread; it resumes when its block is scheduled again.
  void suspend() { Context::switch_to(current_->context, scheduler_); }

  void give_way() {
    current_->block->runnable.push_back(current_->number);
    suspend();
  }

  // Sometimes long enough for other blocks to reach the same word and go past it.
  void fall_behind() {
    current_->block->behind_until = steps_ + (1ull << random_.below(16));
    give_way();
  }

  void fail(std::string what) {
    violation_ = std::move(what);
    suspend();  // for good
  }

  void run_thread() {
    thread_(context_);
    finish_atomics_some_time();
    current_->state = State::kDone;
    --current_->block->running;
    suspend();
  }

  void wake(Block& block, int first, int count, State waiting, uint32_t lanes) {
    // The last in this list runs first.
    for (int i = 0; i < count; ++i) {
      const int number = first + (order_ == 1 ? i : count - 1 - i);
      if ((lanes >> number % kWarp & 1u) == 0) continue;
      Thread& thread = block.threads[static_cast<size_t>(number)];
      if (thread.state != waiting) continue;
      thread.state = State::kRunnable;
      block.runnable.push_back(number);
    }
  }

  // Records the block that last worked on a word by an atomic operation.
  void note_atomic(const void* address) {
    const uint64_t me = current_->block->number;
    const auto [last, is_first] = atomics_by_.try_emplace(address, me);
    if (is_first || last->second == me) return;
    shared_a_word_ = true;
    for (const auto& block : resident_) met_ = met_ || block->number == last->second;
    last->second = me;
  }

  void finish_atomics(Thread& thread) {
    for (const LateAtomic& late : thread.late) late.apply(late.address, late.operand);
    thread.late.clear();
  }

  // For an order within the thread's own block: other blocks may not see the operations for a long time.
  void finish_atomics_some_time() {
    while (!current_->late.empty() && random_.below(8) != 0) give_way();
    finish_atomics(*current_);
  }

  bool on_stack_guard(const void* address) const {
    return current_ != nullptr && current_->stack != nullptr && current_->stack->guards(address);
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
    block->running = num_threads_;
    block->at_barrier = 0;
    block->in_collective.assign(static_cast<size_t>((num_threads_ + kWarp - 1) / kWarp), 0);
    block->shared.assign(shared_bytes(), static_cast<char>(random_.next()));  // arbitrary initial contents
    for (int i = 0; i < num_threads_; ++i) {
      Thread& thread = block->threads[static_cast<size_t>(i)];
      const auto n = static_cast<unsigned>(i);
      thread.block = block.get();
      thread.number = i;
      thread.index = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
      thread.state = State::kAtBarrier;  // as if all had waited for the start
    }
    if (options_.watches) watch_.begin_block(*block, shared_bytes());
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
    if (violation_.empty() && block.running == 0) end_block();
  }

  bool is_ready(const Block& block) const { return !block.runnable.empty() && block.behind_until <= steps_; }

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
    if (in_section_ != thread.block && shared_bytes() > 0) {
      if (in_section_ != nullptr) in_section_->shared.assign(shared_begin, shared_end);
      std::memcpy(shared_begin, thread.block->shared.data(), shared_bytes());
    }
    in_section_ = thread.block;
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
    in_section_ = nullptr;
    resident_.erase(resident_.begin() + static_cast<std::ptrdiff_t>(next_));
  }

 public:
  // Opens the block's barrier once every thread that has not left the kernel waits there.
  void open_barrier_if_complete(Block& block) {
    if (block.at_barrier == 0 || block.at_barrier != block.running) return;
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
    block.at_barrier = 0;
    if (barriers_.below(2) != 0) exchange();
    if (options_.watches) watch_.barrier(block);
    wake(block, 0, num_threads_, State::kAtBarrier, ~0u);
  }

 private:
  void (*thread_)(void*);
  void* context_;
  Options options_;
  Random random_;
  Random barriers_;  // of its own: whether something is exchanged changes no order
  Watch watch_{random_};
  uint32_t order_;           // 0: ascending, 1: descending, else: any
  size_t window_;            // the number of blocks under way at once
  uint64_t first_, stride_;  // blocks start at number first_ and advance by stride_ round the grid
  int num_threads_;
  uint64_t num_blocks_;
  uint64_t blocks_left_;
  std::vector<std::unique_ptr<Block>> resident_;
  size_t next_ = 0;
  uint64_t steps_ = 0;
  Block* in_section_ = nullptr;
  Thread* current_ = nullptr;
  Context scheduler_;
  std::string violation_;
  std::unordered_map<const void*, uint64_t> atomics_by_;
  bool shared_a_word_ = false, met_ = false;
  static std::vector<std::unique_ptr<Stack>> stacks_;  // kept for the next launch
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
    violation(text_of("touched memory at %p, which it may not", info->si_addr));
  }

  static constexpr size_t kCount = 3;
  static constexpr int kSignals[kCount] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old_[kCount];
  stack_t old_stack_{};
};

std::mutex one_launch_at_a_time;

}  // namespace

int Block::lanes_of_warp(int warp) const {
  return std::min(kWarp, static_cast<int>(threads.size()) - first_of_warp(warp));
}

void violation(const std::string& what) {
  grid->fail(place_of(grid->current()) + ": " + what);
  __builtin_unreachable();
}

void barrier(Site site) {
  Thread& t = grid->current();
  grid->finish_atomics_some_time();
  t.site = site;
  t.state = State::kAtBarrier;
  ++t.block->at_barrier;
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
    violation(text_of("%s at %s with mask %08x, without its own lane", name_of(kind), place_of(site).c_str(), mask));
  }
  if (kind == Collective::kSync) grid->finish_atomics_some_time();
  t.state = State::kInCollective;
  uint32_t& waiting = t.block->in_collective[static_cast<size_t>(t.warp())];
  waiting |= 1u << t.lane();
  std::string broken;
  try {
    if (finish_collective(*t.block, t)) {
      waiting &= ~mask;
      if (kind == Collective::kSync && grid->watch() != nullptr) grid->watch()->syncwarp(*t.block, t.warp(), mask);
      grid->wake(*t.block, t.block->first_of_warp(t.warp()), t.block->lanes_of_warp(t.warp()), State::kInCollective,
                 mask);
    }
  } catch (const Violation& what) {
    broken = what.what;
  }
  if (!broken.empty()) grid->fail(broken);
  grid->suspend();
  return t.value;
}

namespace {

void check_atomic(void* address, int bytes) {
  if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) != 0) {
    violation(text_of("an atomic of %d bytes at %p, which is not aligned", bytes, address));
  }
  const std::string broken = notice(address, static_cast<size_t>(bytes), Access::kAtomicWrite);
  if (!broken.empty()) violation(broken);
  const bool is_shared = address >= shared_begin && address < shared_end;
  if (grid->yields() && !is_shared) grid->note_atomic(address);
}

}  // namespace

void read_constant(const void* address, int bytes) {
  const std::string broken = notice(const_cast<void*>(address), static_cast<size_t>(bytes), Access::kConstantRead);
  if (!broken.empty()) violation(broken);
}

uint64_t atomic(void* address, int bytes, Apply apply, uint64_t operand, Ordering order) {
  check_atomic(address, bytes);
  if (grid->yields() && grid->coin()) grid->fall_behind();
  Thread& t = grid->current();
  if (order.releases) grid->finish_atomics(t);
  // Its earlier operations on this address come first; those on other addresses may still wait.
  for (size_t i = 0; i < t.late.size(); ++i) {
    if (t.late[i].address != address) continue;
    t.late[i].apply(address, t.late[i].operand);
    t.late.erase(t.late.begin() + static_cast<std::ptrdiff_t>(i--));
  }
  if (grid->watch() != nullptr) grid->watch()->pass_on(t, reinterpret_cast<uintptr_t>(address), order);
  return apply(address, operand);
}

void atomic_without_result(void* address, int bytes, Apply apply, uint64_t operand) {
  check_atomic(address, bytes);
  if (!grid->yields()) {
    apply(address, operand);
    return;
  }
  grid->current().late.push_back({address, apply, operand});
  if (grid->coin()) grid->give_way();
}

bool in_kernel() { return grid != nullptr && grid->running(); }

std::string notice(void* address, size_t bytes, Access access) {
  if (!in_kernel() || grid->watch() == nullptr || grid->current().stack->holds(address)) return {};
  // A volatile value may change between any two reads; so may a plain one, where nothing orders them.
  if (access == Access::kAtomicRead && grid->coin()) grid->give_way();
  const bool is_shared = address >= shared_begin && address < shared_end;
  if (access == Access::kRead && !is_shared && grid->yields() && grid->one_in_64()) grid->give_way();
  try {
    grid->watch()->access(grid->current(), reinterpret_cast<uintptr_t>(address), bytes, access,
                          reinterpret_cast<uintptr_t>(shared_begin), shared_bytes());
  } catch (const Violation& broken) {
    return broken.what;
  }
  return {};
}

cudaError_t launch(const cudaLaunchConfig_t& config, void (*thread)(void*), void* context) {
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  const dim3 &g = config.gridDim, &b = config.blockDim;
  if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535 || b.x == 0 || b.y == 0 ||
      b.z == 0 || b.z > 64 || uint64_t{b.x} * b.y * b.z > 1024 || config.dynamicSmemBytes != 0) {
    return set_error(cudaErrorInvalidConfiguration, "invalid configuration argument");
  }
  if (next_launch_fails()) return set_error(cudaErrorLaunchOutOfResources, "too many resources requested for launch");
  note_stream(config.stream);
  gridDim = g;
  blockDim = b;
  Grid made(config, thread, context, options(), next_seed());
  grid = &made;
  std::string broken;
  {
    const FaultHandlers handlers;
    broken = made.run();
  }
  grid = nullptr;
  return broken.empty() ? cudaSuccess : set_error(cudaErrorLaunchFailure, broken);
}

}  // namespace twin
