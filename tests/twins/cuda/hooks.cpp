// What the compiler calls in kernels built with -fsanitize=thread and -fsanitize=undefined, in place of the
// sanitizers' own libraries.
#include <dlfcn.h>

#include "grid.h"

namespace {

// The place in the program, as addr2line takes it.
std::string code_at(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return "";
  char text[32];
  std::snprintf(text, sizeof text, "+0x%tx", static_cast<char*>(address) - static_cast<char*>(info.dli_fbase) - 1);
  return std::string(" (") + info.dli_fname + text + ")";
}

void report(void* address, size_t bytes, twin::Access access, void* caller) {
  const std::string broken = twin::notice(address, bytes, access);
  if (!broken.empty()) twin::violation("%s%s", broken.c_str(), code_at(caller).c_str());
}

void report_aligned(void* address, size_t bytes, twin::Access access, void* caller) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0 && twin::in_kernel()) {
    twin::violation("an access of %zu bytes at %p, which is not aligned%s", bytes, address, code_at(caller).c_str());
  }
  report(address, bytes, access, caller);
}

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void undefined(const SourceLocation* where, const char* what) {
  if (twin::in_kernel()) twin::violation("%s at %s:%u", what, where->file, where->line);
}

}  // namespace

#define NGRAM_TWIN_HOOK extern "C" __attribute__((visibility("hidden"))) void
#define NGRAM_TWIN_CALLER_ADDRESS __builtin_return_address(0)
#define NGRAM_TWIN_ACCESSES(bytes)                                                    \
  NGRAM_TWIN_HOOK __tsan_read##bytes(void* at) {                                      \
    report_aligned(at, bytes, twin::Access::kRead, NGRAM_TWIN_CALLER_ADDRESS);        \
  }                                                                                   \
  NGRAM_TWIN_HOOK __tsan_write##bytes(void* at) {                                     \
    report_aligned(at, bytes, twin::Access::kWrite, NGRAM_TWIN_CALLER_ADDRESS);       \
  }                                                                                   \
  NGRAM_TWIN_HOOK __tsan_volatile_read##bytes(void* at) {                             \
    report_aligned(at, bytes, twin::Access::kAtomicRead, NGRAM_TWIN_CALLER_ADDRESS);  \
  }                                                                                   \
  NGRAM_TWIN_HOOK __tsan_volatile_write##bytes(void* at) {                            \
    report_aligned(at, bytes, twin::Access::kAtomicWrite, NGRAM_TWIN_CALLER_ADDRESS); \
  }                                                                                   \
  NGRAM_TWIN_HOOK __tsan_unaligned_read##bytes(void* at) {                            \
    report(at, bytes, twin::Access::kRead, NGRAM_TWIN_CALLER_ADDRESS);                \
  }                                                                                   \
  NGRAM_TWIN_HOOK __tsan_unaligned_write##bytes(void* at) {                           \
    report(at, bytes, twin::Access::kWrite, NGRAM_TWIN_CALLER_ADDRESS);               \
  }
NGRAM_TWIN_ACCESSES(1)
NGRAM_TWIN_ACCESSES(2)
NGRAM_TWIN_ACCESSES(4)
NGRAM_TWIN_ACCESSES(8)
NGRAM_TWIN_ACCESSES(16)

NGRAM_TWIN_HOOK __tsan_read_range(void* at, size_t bytes) {
  report(at, bytes, twin::Access::kRead, NGRAM_TWIN_CALLER_ADDRESS);
}
NGRAM_TWIN_HOOK __tsan_write_range(void* at, size_t bytes) {
  report(at, bytes, twin::Access::kWrite, NGRAM_TWIN_CALLER_ADDRESS);
}
NGRAM_TWIN_HOOK __tsan_init() {}
NGRAM_TWIN_HOOK __tsan_func_entry(void*) {}
NGRAM_TWIN_HOOK __tsan_func_exit() {}

// The first member of the data that these receive is always the place in the source.
#define NGRAM_TWIN_UNDEFINED(name, ...)                                               \
  NGRAM_TWIN_HOOK __ubsan_handle_##name(const SourceLocation* where, ##__VA_ARGS__) { \
    undefined(where, "undefined behaviour (" #name ")");                              \
  }
NGRAM_TWIN_UNDEFINED(out_of_bounds, void*)
NGRAM_TWIN_UNDEFINED(add_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(sub_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(mul_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(negate_overflow, void*)
NGRAM_TWIN_UNDEFINED(divrem_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(shift_out_of_bounds, void*, void*)
