// Simulates the CUDA driver: streams that run host functions late. Copies and errors are simulated as well.
#include <cstring>

#include "../../cpp/late_stream.h"

using ngram_npu::test::LateStream;

static LateStream& as_stream(void* stream) { return *static_cast<LateStream*>(stream); }

extern "C" {

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return as_stream(stream).add([=] { function(data); });
}

void* stand_in_stream() { return new LateStream; }  // never freed, like the thread of a CUDA context
void stand_in_copy(void* stream, void* to, const void* from, size_t bytes) {
  as_stream(stream).add([=] { std::memcpy(to, from, bytes); });
}
void stand_in_wait(void* stream) { as_stream(stream).wait(); }
void stand_in_hold(void* stream, bool hold) { as_stream(stream).hold(hold); }
void stand_in_fail(void* stream) { as_stream(stream).fail(); }
}
