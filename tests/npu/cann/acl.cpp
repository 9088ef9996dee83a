// A stand-in for the necessary parts of CANN's runtime: a device whose memory is the host's and whose streams run work
// at once. The other functions do nothing (stand_ins.py). The prototypes are those of the real headers.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "stand_in.h"

namespace {

std::mutex mutex;
std::string record;  // one line per launch or copy
const void* last_stream = nullptr;
std::atomic<int> waits{0};
std::mutex device;  // a test that holds it stops the device

// A fault or a size that a test has requested.
int64_t asked(const char* variable, int64_t otherwise) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoll(text) : otherwise;
}

void note(const std::string& line) {
  const std::lock_guard<std::mutex> lock(mutex);
  record += line + "\n";
}

aclError allocate(void** memory, size_t bytes) {
  return posix_memalign(memory, 512, bytes > 0 ? bytes : 1) == 0 ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

aclError copy(void* to, const void* from, size_t bytes) {
  std::memmove(to, from, bytes);
  note("copy");
  return ACL_SUCCESS;
}

struct Event {
  std::chrono::steady_clock::time_point time;
};

aclError make(void** handle) {  // of a stream or an event
  *handle = new Event;
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

uint32_t stand_in_record(const char* kernel, const void* stream) {
  const std::lock_guard<std::mutex> turn(device);
  note(kernel);
  last_stream = stream;
  return asked("STAND_IN_FAILS", 0) != 0 ? ACL_ERROR_RT_AICORE_EXCEPTION : ACL_SUCCESS;
}

void stand_in_hold() { device.lock(); }
void stand_in_release() { device.unlock(); }

// Every function of this library begins with this (-finstrument-functions): the names of CANN's go into a list, each
// with a line's end. In C alone: what a std:: header inlines is instrumented too. libc has hooks
// of its own, so the library is linked with -Bsymbolic.
#define STAND_IN_HOOK __attribute__((no_instrument_function))
static char calls[1 << 18];
static size_t calls_end = 0;
STAND_IN_HOOK void __cyg_profile_func_enter(void* function, void*) {
  if (__atomic_load_n(&calls_end, __ATOMIC_SEQ_CST) >= sizeof(calls)) return;
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != function) return;
  if (std::strncmp(info.dli_sname, "acl", 3) != 0 && std::strncmp(info.dli_sname, "Hccl", 4) != 0) return;
  const size_t length = std::strlen(info.dli_sname);
  const size_t at = __atomic_fetch_add(&calls_end, length + 1, __ATOMIC_SEQ_CST);
  if (at + length + 1 >= sizeof(calls)) return;
  std::memcpy(calls + at, info.dli_sname, length);
  calls[at + length] = '\n';
}
STAND_IN_HOOK void __cyg_profile_func_exit(void*, void*) {}

// The calls since the last one of this, or that there are too many of them.
__attribute__((no_instrument_function)) const char* stand_in_take_calls() {
  static char copy[sizeof(calls)];
  const size_t length = __atomic_exchange_n(&calls_end, 0, __ATOMIC_SEQ_CST);
  if (length >= sizeof(calls)) return "too many calls to list\n";
  std::memcpy(copy, calls, length);
  copy[length] = 0;
  return copy;
}

// Number of waits for the device.
int stand_in_waits() { return waits; }

int stand_in_last_stream_is(const void* stream) {
  aclrtSynchronizeDevice();
  return last_stream == stream;
}

// Copies the record and clears it. Returns its length, which is more than `bytes` if it does not fit.
size_t stand_in_take_record(char* into, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const size_t length = record.copy(into, bytes);
  const size_t all = record.size();
  record.clear();
  return all > length ? all : length;
}

// A binary is a shared library here, a kernel a function in it.
aclError aclrtBinaryLoadFromFile(const char* path, aclrtBinaryLoadOptions*, aclrtBinHandle* binary) {
  const char* devices = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  note(std::string("load, devices ") + (devices != nullptr ? devices : "all"));
  *binary = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return *binary != nullptr ? ACL_SUCCESS : ACL_ERROR_INVALID_FILE;
}
aclError aclrtBinaryGetFunction(const aclrtBinHandle binary, const char* name, aclrtFuncHandle* function) {
  *function = dlsym(binary, name);
  return *function != nullptr ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM;
}
// Arguments: the kernel's own, and one word after them.
aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle function, uint32_t blocks, aclrtStream stream,
                                       aclrtLaunchKernelCfg*, void* args, size_t bytes, aclrtPlaceHolderInfo*,
                                       size_t placeholders) {
  if (bytes != kStandInArgsBytes + 8 || placeholders != 0) return ACL_ERROR_INVALID_PARAM;
  using Kernel = uint32_t (*)(uint32_t blocks, void* stream, const void* args);
  return static_cast<aclError>(reinterpret_cast<Kernel>(function)(blocks, stream, args));
}

aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* data) {
  const std::lock_guard<std::mutex> turn(device);
  note("host function");
  function(data);
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = 1;
  return ACL_SUCCESS;
}
// A thread has no device until it sets one.
static thread_local bool has_device = false;
aclError aclrtSetDevice(int32_t) {
  has_device = true;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* device) {
  *device = 0;
  return has_device ? ACL_SUCCESS : ACL_ERROR_RT_CONTEXT_NULL;
}
const char* aclrtGetSocName() { return "Ascend910B3"; }
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t* value) {
  if (what != ACL_DEV_ATTR_VECTOR_CORE_NUM) return ACL_ERROR_INVALID_PARAM;  // the UB's size is not told, as by CANN 8
  *value = asked("STAND_IN_CORES", kStandInVectorCores);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream) { return ++waits, ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ++waits, ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ++waits, ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ++waits, ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ++waits, ACL_SUCCESS; }
aclError aclrtMalloc(void** memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
aclError aclrtMallocAlign32(void** memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
aclError aclrtMallocHost(void** memory, size_t bytes) { return allocate(memory, bytes); }
aclError aclrtFree(void* memory) {
  std::free(memory);
  return ACL_SUCCESS;
}
aclError aclrtFreeHost(void* memory) { return aclrtFree(memory); }
aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind) {
  return copy(to, from, bytes);
}
aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind, aclrtStream) {
  return copy(to, from, bytes);
}
aclError aclrtMemset(void* memory, size_t, int32_t value, size_t bytes) {
  std::memset(memory, value, bytes);
  return ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* memory, size_t, int32_t value, size_t bytes, aclrtStream) {
  return aclrtMemset(memory, bytes, value, bytes);
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
  *free = *total = size_t{1} << 33;
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream* stream) { return make(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return make(stream); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return make(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return make(event); }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->time = std::chrono::steady_clock::now();
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent from, aclrtEvent to) {
  const std::chrono::duration<float, std::milli> elapsed =
      static_cast<Event*>(to)->time - static_cast<Event*>(from)->time;
  *milliseconds = elapsed.count();
  return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  static int only;
  *context = &only;
  return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt) { return 2; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  std::strncpy(value, "0", length);
  return ACL_SUCCESS;
}
}
