// What the compiler calls in kernels built with -fsanitize=thread and -fsanitize=undefined, in place of the
// sanitizers' own libraries.
#include <dlfcn.h>

#include "grid.h"

namespace {

// The place in the program, as addr2line takes it.
std::string code_at(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return "";
  const std::ptrdiff_t offset = static_cast<char*>(address) - static_cast<char*>(info.dli_fbase) - 1;
  return twin::format_text(" (%s+0x%tx)", info.dli_fname, offset);
}

void report(void* address, size_t bytes, twin::Access access, void* caller) {
  const std::string error = twin::check_access(address, bytes, access);
  if (!error.empty()) twin::violation(error + code_at(caller));
}

void report_aligned(void* address, size_t bytes, twin::Access access, void* caller) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0 && twin::in_kernel()) {
    twin::violation(twin::format_text("an access of %zu bytes at %p, which is not aligned", bytes, address) +
                    code_at(caller));
  }
  report(address, bytes, access, caller);
}

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void undefined(const SourceLocation* where, const char* what) {
  if (twin::in_kernel()) twin::violation(twin::format_text("%s at %s:%u", what, where->file, where->line));
}

}  // namespace

#define NGRAM_TWIN_HOOK extern "C" __attribute__((visibility("hidden"))) void
#define NGRAM_TWIN_CALLER_ADDRESS __builtin_return_address(0)
#define NGRAM_TWIN_ACCESS(name, bytes, check, kind) \
  NGRAM_TWIN_HOOK __tsan_##name##bytes(void* at) { check(at, bytes, twin::Access::kind, NGRAM_TWIN_CALLER_ADDRESS); }
#define NGRAM_TWIN_ACCESSES(bytes)                                       \
  NGRAM_TWIN_ACCESS(read, bytes, report_aligned, kRead)                  \
  NGRAM_TWIN_ACCESS(write, bytes, report_aligned, kWrite)                \
  NGRAM_TWIN_ACCESS(volatile_read, bytes, report_aligned, kAtomicRead)   \
  NGRAM_TWIN_ACCESS(volatile_write, bytes, report_aligned, kAtomicWrite) \
  NGRAM_TWIN_ACCESS(unaligned_read, bytes, report, kRead)                \
  NGRAM_TWIN_ACCESS(unaligned_write, bytes, report, kWrite)
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
NGRAM_TWIN_HOOK __tsan_vptr_update(void**, void*) {}
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
