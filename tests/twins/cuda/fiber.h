// A thread of control that is switched by hand: thousands of such switches cost as much as one between OS
// threads.
#pragma once

#include <cstddef>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace twin {

// Memory for one fiber's calls, with an inaccessible page below it: an overflow is a fault, not a stray write.
class Stack {
 public:
  static constexpr size_t kBytes = size_t{128} << 10;
  Stack();
  ~Stack();
  Stack(const Stack&) = delete;
  Stack& operator=(const Stack&) = delete;

  char* top() const { return memory_ + kBytes; }
  bool holds(const void* address) const { return address >= memory_ && address < memory_ + kBytes; }
  bool guards(const void* address) const;

 private:
  char* memory_;
};

// The point at which a suspended thread of control resumes.
class Context {
 public:
  // A context that begins in `entry`, which must not return.
  void begin(const Stack& stack, void (*entry)());
  // Saves the running thread of control in `from`, and resumes `to`.
  static void switch_to(Context& from, Context& to);

 private:
#if defined(__x86_64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_{};
#endif
};

}  // namespace twin
