// The functions that the compiler calls in kernels built with -fsanitize=thread and -fsanitize=undefined. They replace
// the sanitizers' libraries: each memory access is checked by the model, and undefined behaviour ends the launch.
#include <dlfcn.h>

#include "grid.h"

namespace {

// Returns " (library+offset)" for a code address, in the form that addr2line reads.
std::string describe_code_address(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0) return "";
  const std::ptrdiff_t offset = static_cast<char*>(address) - static_cast<char*>(info.dli_fbase) - 1;
  return twin::format_text(" (%s+0x%tx)", info.dli_fname, offset);
}

void check_unaligned_access(void* address, size_t bytes, twin::Access access, void* caller) {
  const std::string error = twin::check_access(address, bytes, access);
  if (!error.empty()) twin::fail_launch(error + describe_code_address(caller));
}

void check_aligned_access(void* address, size_t bytes, twin::Access access, void* caller) {
  if (reinterpret_cast<uintptr_t>(address) % bytes != 0 && twin::is_in_kernel()) {
    twin::fail_launch(twin::format_text("an access of %zu bytes at %p, which is not aligned", bytes, address) +
                      describe_code_address(caller));
  }
  check_unaligned_access(address, bytes, access, caller);
}

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};

void report_undefined_behaviour(const SourceLocation* location, const char* description) {
  if (twin::is_in_kernel())
    twin::fail_launch(twin::format_text("%s at %s:%u", description, location->file, location->line));
}

}  // namespace

#define NGRAM_TWIN_HOOK extern "C" __attribute__((visibility("hidden"))) void
#define NGRAM_TWIN_CALLER_ADDRESS __builtin_return_address(0)
#define NGRAM_TWIN_ACCESS(name, bytes, check, type)                       \
  NGRAM_TWIN_HOOK __tsan_##name##bytes(void* address) {                   \
    check(address, bytes, twin::Access::type, NGRAM_TWIN_CALLER_ADDRESS); \
  }
#define NGRAM_TWIN_ACCESSES(bytes)                                        \
  NGRAM_TWIN_ACCESS(read, bytes, check_aligned_access, kRead)             \
  NGRAM_TWIN_ACCESS(write, bytes, check_aligned_access, kWrite)           \
  NGRAM_TWIN_ACCESS(unaligned_read, bytes, check_unaligned_access, kRead) \
  NGRAM_TWIN_ACCESS(unaligned_write, bytes, check_unaligned_access, kWrite)
NGRAM_TWIN_ACCESSES(1)
NGRAM_TWIN_ACCESSES(2)
NGRAM_TWIN_ACCESSES(4)
NGRAM_TWIN_ACCESSES(8)
NGRAM_TWIN_ACCESSES(16)

NGRAM_TWIN_HOOK __tsan_read_range(void* address, size_t bytes) {
  check_unaligned_access(address, bytes, twin::Access::kRead, NGRAM_TWIN_CALLER_ADDRESS);
}
NGRAM_TWIN_HOOK __tsan_write_range(void* address, size_t bytes) {
  check_unaligned_access(address, bytes, twin::Access::kWrite, NGRAM_TWIN_CALLER_ADDRESS);
}
NGRAM_TWIN_HOOK __tsan_init() {}
NGRAM_TWIN_HOOK __tsan_vptr_update(void**, void*) {}
NGRAM_TWIN_HOOK __tsan_func_entry(void*) {}
NGRAM_TWIN_HOOK __tsan_func_exit() {}

// The first member of the data that these functions receive is always the source location.
#define NGRAM_TWIN_UNDEFINED(name, ...)                                                  \
  NGRAM_TWIN_HOOK __ubsan_handle_##name(const SourceLocation* location, ##__VA_ARGS__) { \
    report_undefined_behaviour(location, "undefined behaviour (" #name ")");             \
  }
NGRAM_TWIN_UNDEFINED(out_of_bounds, void*)
NGRAM_TWIN_UNDEFINED(add_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(sub_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(mul_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(negate_overflow, void*)
NGRAM_TWIN_UNDEFINED(divrem_overflow, void*, void*)
NGRAM_TWIN_UNDEFINED(shift_out_of_bounds, void*, void*)
