// Simulates the CUDA driver: contexts, and streams that run copies and host functions late, or fail.
#include <cstring>

#include "../../cpp/late_stream.h"

using ngram_npu::test::LateStream;

// As in CUDA, a thread has a current context only after a call that makes one current.
constexpr int kErrorInvalidContext = 201;
static int context_object;
static thread_local void* current_context = nullptr;

static LateStream& as_stream(void* stream) { return *static_cast<LateStream*>(stream); }

extern "C" {

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  if (current_context == nullptr) return kErrorInvalidContext;
  return as_stream(stream).add_task([=] { function(data); });
}
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current_context = context;
  return 0;
}

// Makes a context current, as torch does when it creates a stream. The stream is never freed.
void* stand_in_create_stream() {
  current_context = &context_object;
  return new LateStream;
}
void stand_in_copy(void* stream, void* destination, const void* source, size_t bytes) {
  as_stream(stream).add_task([=] { std::memcpy(destination, source, bytes); });
}
void stand_in_wait(void* stream) { as_stream(stream).wait(); }
void stand_in_hold(void* stream, bool is_held) { as_stream(stream).hold(is_held); }
void stand_in_fail(void* stream) { as_stream(stream).fail(); }
}
