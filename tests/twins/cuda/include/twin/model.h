// The model of a GPU: the calls that device functions make. Every call may yield to other threads. A call by which the
// kernel breaks a rule does not return: the launch ends with an error that names the rule.
#pragma once

#include <cstdint>
#include <string_view>

#define NGRAM_TWIN_SHARED_SECTION "ngram_twin_shared"
// The place of a call in the kernel's source, from two defaulted parameters. An address would not do: the compiler may
// duplicate code.
#define NGRAM_TWIN_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NGRAM_TWIN_SITE (twin::Site{file, line})

namespace twin {

// Whether a function, given by its __PRETTY_FUNCTION__, is not a template instance: see __shared__.
constexpr bool keeps_shared_memory(std::string_view function) { return function.find("[with ") == function.npos; }

struct Site {
  const char* file;
  int line;
};

enum class Collective {
  kSync,
  kShuffle,  // from the lane `operand`
  kShuffleUp,
  kBallot,
  kAny,
  kMax,
};

// A barrier of all threads of the block.
void barrier(Site site);

// The lanes in `mask`; values are passed as their bits, 32-bit ones without sign extension.
uint64_t collective(Collective kind, uint32_t mask, uint64_t value, int operand, Site site);

void fence();  // of the device
// A read of memory that no thread of the launch may write, before or after.
void read_constant(const void* address, int bytes);

// An atomic operation: `apply` changes *address by `operand` and returns the old value. If the result
// is not used (`deferrable`) it may take effect later, but no later than the thread's next fence or barrier.
using Apply = uint64_t (*)(void* address, uint64_t operand);
// The additional order that an atomic operation establishes, device-wide.
struct Ordering {
  bool acquires = false;
  bool releases = false;
};
uint64_t atomic(void* address, int bytes, Apply apply, uint64_t operand, Ordering order = {});
void atomic_without_result(void* address, int bytes, Apply apply, uint64_t operand);

}  // namespace twin
