// Simulates the CUDA driver: streams that run host functions late. Copies and errors are simulated as well.
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
  return as_stream(stream).add([=] { function(data); });
}
int cuCtxGetCurrent(void** context) {
  *context = current_context;
  return 0;
}
int cuCtxSetCurrent(void* context) {
  current_context = context;
  return 0;
}

// Never freed, like the thread of a CUDA context, which torch makes current when it creates a stream.
void* stand_in_stream() {
  current_context = &context_object;
  return new LateStream;
}
void stand_in_copy(void* stream, void* to, const void* from, size_t bytes) {
  as_stream(stream).add([=] { std::memcpy(to, from, bytes); });
}
void stand_in_wait(void* stream) { as_stream(stream).wait(); }
void stand_in_hold(void* stream, bool hold) { as_stream(stream).hold(hold); }
void stand_in_fail(void* stream) { as_stream(stream).fail(); }
}
