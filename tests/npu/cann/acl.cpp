// Implements the parts of CANN's runtime that the tests need, on the CPU: device memory is host memory, and streams run
// work immediately. All other functions of CANN do nothing (stand_ins.py). The real headers declare the prototypes.
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

std::mutex record_mutex;
std::string record;  // one line per launch, copy, host function and loaded binary
const void* last_stream = nullptr;
std::atomic<int> num_waits{0};  // for the device, a stream or an event
std::mutex device_mutex;        // work waits while a test holds the mutex

// Returns the number in an environment variable. Tests set these variables to request faults and sizes.
int64_t read_variable(const char* variable, int64_t default_value) {
  const char* text = std::getenv(variable);
  return text != nullptr ? std::atoll(text) : default_value;
}

void append_to_record(const std::string& line) {
  const std::lock_guard<std::mutex> lock(record_mutex);
  record += line + "\n";
}

aclError allocate(void** memory, size_t bytes) {
  return posix_memalign(memory, 512, bytes > 0 ? bytes : 1) == 0 ? ACL_SUCCESS : ACL_ERROR_BAD_ALLOC;
}

aclError copy_memory(void* destination, const void* source, size_t bytes) {
  std::memmove(destination, source, bytes);
  append_to_record("copy");
  return ACL_SUCCESS;
}

struct Event {
  std::chrono::steady_clock::time_point time;
};

aclError create_handle(void** handle) {  // of a stream or an event
  *handle = new Event;
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

uint32_t stand_in_record_launch(const char* kernel, const void* stream) {
  const std::lock_guard<std::mutex> lock(device_mutex);
  append_to_record(kernel);
  last_stream = stream;
  return read_variable("STAND_IN_FAILS", 0) != 0 ? ACL_ERROR_RT_AICORE_EXCEPTION : ACL_SUCCESS;
}

void stand_in_hold() { device_mutex.lock(); }
void stand_in_release() { device_mutex.unlock(); }

// With -finstrument-functions, every function of this library calls this hook at its begin. If the function is one of
// CANN's, the hook appends the name and a line break to `calls`. The hook uses only C, because inlined std:: functions
// are instrumented, too. The library is linked with -Bsymbolic, because libc has hooks with the same names.
#define STAND_IN_HOOK __attribute__((no_instrument_function))
static char calls[1 << 18];
static size_t calls_end = 0;
STAND_IN_HOOK void __cyg_profile_func_enter(void* function, void*) {
  if (__atomic_load_n(&calls_end, __ATOMIC_SEQ_CST) >= sizeof(calls)) return;
  Dl_info info;
  if (dladdr(function, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != function) return;
  if (std::strncmp(info.dli_sname, "acl", 3) != 0 && std::strncmp(info.dli_sname, "Hccl", 4) != 0) return;
  const size_t length = std::strlen(info.dli_sname);
  const size_t begin = __atomic_fetch_add(&calls_end, length + 1, __ATOMIC_SEQ_CST);
  if (begin + length + 1 >= sizeof(calls)) return;
  std::memcpy(calls + begin, info.dli_sname, length);
  calls[begin + length] = '\n';
}
STAND_IN_HOOK void __cyg_profile_func_exit(void*, void*) {}

// Returns the calls since the last call of this function, or a message if there are too many.
STAND_IN_HOOK const char* stand_in_take_calls() {
  static char copy[sizeof(calls)];
  const size_t length = __atomic_exchange_n(&calls_end, 0, __ATOMIC_SEQ_CST);
  if (length >= sizeof(calls)) return "too many calls to list\n";
  std::memcpy(copy, calls, length);
  copy[length] = 0;
  return copy;
}

int stand_in_get_num_waits() { return num_waits; }

// Returns whether the last launch was on this stream.
int stand_in_is_last_stream(const void* stream) { return last_stream == stream; }

// Copies the record to a buffer and clears the record. Returns the record's length, which is larger than `bytes` if the
// buffer is too small.
size_t stand_in_take_record(char* buffer, size_t bytes) {
  const std::lock_guard<std::mutex> lock(record_mutex);
  record.copy(buffer, bytes);
  const size_t length = record.size();
  record.clear();
  return length;
}

// Here, a binary is a shared library, and a kernel is one of its functions.
aclError aclrtBinaryLoadFromFile(const char* path, aclrtBinaryLoadOptions*, aclrtBinHandle* binary) {
  const char* devices = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  append_to_record(std::string("load, devices ") + (devices != nullptr ? devices : "all"));
  *binary = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  return *binary != nullptr ? ACL_SUCCESS : ACL_ERROR_INVALID_FILE;
}
aclError aclrtBinaryGetFunction(const aclrtBinHandle binary, const char* name, aclrtFuncHandle* function) {
  *function = dlsym(binary, name);
  return *function != nullptr ? ACL_SUCCESS : ACL_ERROR_INVALID_PARAM;
}
// `args` contains the kernel's arguments and the address for CANN's overflow check, which only debug builds use.
aclError aclrtLaunchKernelWithHostArgs(aclrtFuncHandle function, uint32_t blocks, aclrtStream stream,
                                       aclrtLaunchKernelCfg*, void* args, size_t bytes, aclrtPlaceHolderInfo*,
                                       size_t placeholders) {
  if (bytes != kStandInArgsBytes + 8 || placeholders != 0) return ACL_ERROR_INVALID_PARAM;
  using Kernel = uint32_t (*)(uint32_t blocks, void* stream, const void* args);
  return static_cast<aclError>(reinterpret_cast<Kernel>(function)(blocks, stream, args));
}

aclError aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc function, void* data) {
  const std::lock_guard<std::mutex> lock(device_mutex);
  append_to_record("host function");
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
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t* value) {
  if (attribute != ACL_DEV_ATTR_VECTOR_CORE_NUM)
    return ACL_ERROR_INVALID_PARAM;  // as in CANN 8, which does not report the size of the unified buffer
  *value = read_variable("STAND_IN_CORES", kStandInVectorCores);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream) { return ++num_waits, ACL_SUCCESS; }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream, int32_t) { return ++num_waits, ACL_SUCCESS; }
aclError aclrtSynchronizeDevice() { return ++num_waits, ACL_SUCCESS; }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ++num_waits, ACL_SUCCESS; }
aclError aclrtSynchronizeEvent(aclrtEvent) { return ++num_waits, ACL_SUCCESS; }
aclError aclrtMalloc(void** memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
aclError aclrtMallocAlign32(void** memory, size_t bytes, aclrtMemMallocPolicy) { return allocate(memory, bytes); }
aclError aclrtMallocHost(void** memory, size_t bytes) { return allocate(memory, bytes); }
aclError aclrtFree(void* memory) {
  std::free(memory);
  return ACL_SUCCESS;
}
aclError aclrtFreeHost(void* memory) { return aclrtFree(memory); }
aclError aclrtMemcpy(void* destination, size_t, const void* source, size_t bytes, aclrtMemcpyKind) {
  return copy_memory(destination, source, bytes);
}
aclError aclrtMemcpyAsync(void* destination, size_t, const void* source, size_t bytes, aclrtMemcpyKind, aclrtStream) {
  return copy_memory(destination, source, bytes);
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
aclError aclrtCreateStream(aclrtStream* stream) { return create_handle(stream); }
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return create_handle(stream); }
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return create_handle(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return create_handle(event); }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream) {
  static_cast<Event*>(event)->time = std::chrono::steady_clock::now();
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent begin, aclrtEvent end) {
  const std::chrono::duration<float, std::milli> elapsed =
      static_cast<Event*>(end)->time - static_cast<Event*>(begin)->time;
  *milliseconds = elapsed.count();
  return ACL_SUCCESS;
}
aclError aclrtQueryEventStatus(aclrtEvent, aclrtEventRecordedStatus* status) {
  *status = ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  static int context_object;
  *context = &context_object;
  return ACL_SUCCESS;
}
size_t aclGetCompileoptSize(aclCompileOpt) { return 2; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  std::strncpy(value, "0", length);
  return ACL_SUCCESS;
}
}
