// Stacks of fibers, and switching between fibers (grid.h).
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <new>

#include "grid.h"

#if defined(__x86_64__)
// Pushes the callee-saved registers, stores the stack pointer in *saved_stack_pointer, and continues on the stack of
// `stack_pointer`, from which it pops the registers of the other fiber.
extern "C" void ngram_twin_switch(void** saved_stack_pointer, void* stack_pointer);
asm(R"(
.text
.p2align 4
.hidden ngram_twin_switch
.globl ngram_twin_switch
.type ngram_twin_switch, @function
ngram_twin_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ngram_twin_switch, .-ngram_twin_switch
)");
#endif

namespace twin {
namespace {

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

Stack::Stack() {
  void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  memory_ = static_cast<char*>(memory);
  mprotect(memory_, page_bytes(), PROT_NONE);
}

Stack::~Stack() { munmap(memory_, kBytes); }

bool Stack::is_in_guard_page(const void* address) const {
  return address >= memory_ && address < memory_ + page_bytes();
}

#if defined(__x86_64__)

void Context::prepare(const Stack& stack, void (*entry)()) {
  constexpr int kNumSavedRegisters = 6;
  auto* top = reinterpret_cast<void**>(stack.top());
  // `entry` starts as if it had been called, but never returns. This word stands for the return address; the ABI
  // requires that the stack pointer is a multiple of 16 before a call pushes that address.
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < kNumSavedRegisters; ++i) *--top = nullptr;
  stack_pointer_ = top;
}

void Context::switch_to(Context& from, Context& to) { ngram_twin_switch(&from.stack_pointer_, to.stack_pointer_); }

#else

void Context::prepare(const Stack& stack, void (*entry)()) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack.top() - (Stack::kBytes - page_bytes());
  context_.uc_stack.ss_size = Stack::kBytes - page_bytes();
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}

void Context::switch_to(Context& from, Context& to) { swapcontext(&from.context_, &to.context_); }

#endif

}  // namespace twin
