// A stand-in for the CUDA driver, under its own name: streams that run host functions late. Copies are the stand-in's,
// as are errors.
#include <cstring>

#include "../../cpp/late_stream.h"

using ngram_npu::test::LateStream;

static LateStream& of(void* stream) { return *static_cast<LateStream*>(stream); }

extern "C" {

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return of(stream).add([=] { function(data); });
}

void* stand_in_stream() { return new LateStream; }  // as a context's thread, it lives until the process ends
void stand_in_copy(void* stream, void* to, const void* from, size_t bytes) {
  of(stream).add([=] { std::memcpy(to, from, bytes); });
}
void stand_in_wait(void* stream) { of(stream).wait(); }
void stand_in_hold(void* stream, bool held) { of(stream).hold(held); }
void stand_in_fail(void* stream) { of(stream).fail(); }
}
