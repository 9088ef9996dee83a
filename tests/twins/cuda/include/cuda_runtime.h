// The part of CUDA that the kernels in csrc/cuda use, for an ordinary C++ compiler. The include path has this header
// before the toolkit's header of the same name. Device functions are plain functions; barriers, collectives and atomic
// operations call the model (grid.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string_view>
#include <tuple>
#include <utility>

// The functions of the model that device functions call. Every call may yield to other threads. If a call breaks a rule
// of CUDA, the call does not return: the launch ends with an error that names the rule.

// The linker section with the shared memory of the source file. CMakeLists.txt names one section per kernel file, so
// that the model exchanges only the shared memory of the file whose kernel runs.
#ifndef NGRAM_TWIN_SHARED_SECTION
#define NGRAM_TWIN_SHARED_SECTION "ngram_twin_shared"
#endif
// The source location of a call in the kernel, from two parameters with defaults. The return address does not identify
// the call, because the compiler may duplicate code.
#define NGRAM_TWIN_CALLER_PARAMETERS const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NGRAM_TWIN_CALL_SITE (twin::CallSite{file, line})

namespace twin {

// Returns whether a function, given by its __PRETTY_FUNCTION__, is not an instance of a template: see __shared__.
constexpr bool is_plain_function(std::string_view function) { return function.find("[with ") == function.npos; }

struct CallSite {
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

// Waits until all threads of the block have reached a barrier.
void wait_at_barrier(CallSite site);

// Runs a collective of the lanes in `mask` and returns the calling lane's result. Values are passed as 64 bits; 32-bit
// values are extended with zeros.
uint64_t run_collective(Collective collective, uint32_t mask, uint64_t value, int operand, CallSite site);

// Returns the dynamic shared memory of the running thread's block.
void* get_dynamic_shared_memory();

// Checks a read of memory that no thread of the launch may write, neither before nor after this call.
void check_constant_read(const void* address, int bytes);

// The function of an atomic operation: changes the value at `address` with `operand` and returns the old value.
using AtomicFunction = uint64_t (*)(void* address, uint64_t operand);
// The order of other accesses that an atomic operation establishes, device-wide.
struct AtomicOrder {
  bool acquires = false;
  bool releases = false;
};
// Applies an atomic operation and returns the old value.
uint64_t apply_atomic(void* address, int bytes, AtomicFunction apply, uint64_t operand, AtomicOrder order = {});
// Applies an atomic operation, at the latest at the thread's next barrier or releasing atomic operation.
void apply_atomic_without_result(void* address, int bytes, AtomicFunction apply, uint64_t operand);

}  // namespace twin

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
// Shared memory is in a separate linker section, whose contents the model exchanges when another block runs. In a
// template the compiler ignores the section, and all blocks would share one copy; therefore __shared__ in a template
// does not compile. Declare the shared memory of a kernel template in a separate function that is not a template.
#define __shared__                                                                                               \
  static_assert(twin::is_plain_function(__PRETTY_FUNCTION__), "__shared__ in a template is not kept per block"); \
  static __attribute__((section(NGRAM_TWIN_SHARED_SECTION)))

// Kernels declare this array only for CUDA's compiler, because the model has separate memory for each block.
#define dynamic_shared_memory (static_cast<int4*>(twin::get_dynamic_shared_memory()))

using cudaStream_t = struct CUstream_st*;

struct alignas(16) int4 {
  int x, y, z, w;
};
struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

// The running thread's values; the model sets them when it switches threads.
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

// Functions for device code.

// Functions of the model whose accesses must not be checked as if the kernel made them.
#define NGRAM_TWIN_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

namespace twin {

template <class T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "collectives and atomic operations have values of 32 or 64 bits");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

// The return value of an atomic operation, which is applied when the value is read. If no one reads the value, the
// destructor applies the operation, whose effect may then be delayed.
template <class T>
class AtomicResult {
 public:
  AtomicResult(T* address, AtomicFunction apply, T operand) : address_(address), apply_(apply), operand_(operand) {}
  AtomicResult(const AtomicResult&) = delete;
  AtomicResult& operator=(const AtomicResult&) = delete;
  ~AtomicResult() noexcept(false) {
    if (!is_applied_) apply_atomic_without_result(address_, sizeof(T), apply_, to_bits(operand_));
  }
  operator T() {
    if (!is_applied_) old_value_ = from_bits<T>(apply_atomic(address_, sizeof(T), apply_, to_bits(operand_)));
    is_applied_ = true;
    return old_value_;
  }

 private:
  T* address_;
  AtomicFunction apply_;
  T operand_;
  T old_value_{};
  bool is_applied_ = false;
};

}  // namespace twin

inline void __syncthreads(NGRAM_TWIN_CALLER_PARAMETERS) { twin::wait_at_barrier(NGRAM_TWIN_CALL_SITE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, NGRAM_TWIN_CALLER_PARAMETERS) {
  twin::run_collective(twin::Collective::kSync, mask, 0, 0, NGRAM_TWIN_CALL_SITE);
}

// Overloads for the types that CUDA supports instead of a template, so that arguments convert as in CUDA.
#define NGRAM_TWIN_SHUFFLES(T)                                                                                     \
  inline T __shfl_sync(unsigned mask, T value, int lane, NGRAM_TWIN_CALLER_PARAMETERS) {                           \
    return twin::from_bits<T>(                                                                                     \
        twin::run_collective(twin::Collective::kShuffle, mask, twin::to_bits(value), lane, NGRAM_TWIN_CALL_SITE)); \
  }                                                                                                                \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, NGRAM_TWIN_CALLER_PARAMETERS) {                  \
    return twin::from_bits<T>(twin::run_collective(twin::Collective::kShuffleUp, mask, twin::to_bits(value),       \
                                                   static_cast<int>(delta), NGRAM_TWIN_CALL_SITE));                \
  }
NGRAM_TWIN_SHUFFLES(int)
NGRAM_TWIN_SHUFFLES(unsigned)
NGRAM_TWIN_SHUFFLES(long)
NGRAM_TWIN_SHUFFLES(unsigned long)
NGRAM_TWIN_SHUFFLES(long long)
NGRAM_TWIN_SHUFFLES(unsigned long long)
#undef NGRAM_TWIN_SHUFFLES

#define NGRAM_TWIN_COLLECTIVE(Result, name, T, collective)                                                        \
  inline Result name(unsigned mask, T value, NGRAM_TWIN_CALLER_PARAMETERS) {                                      \
    return twin::from_bits<Result>(                                                                               \
        twin::run_collective(twin::Collective::collective, mask, twin::to_bits(value), 0, NGRAM_TWIN_CALL_SITE)); \
  }
NGRAM_TWIN_COLLECTIVE(unsigned, __ballot_sync, int, kBallot)
NGRAM_TWIN_COLLECTIVE(int, __any_sync, int, kAny)
NGRAM_TWIN_COLLECTIVE(unsigned, __reduce_max_sync, unsigned, kMax)
#undef NGRAM_TWIN_COLLECTIVE

#define NGRAM_TWIN_ATOMIC(name, T, expression)                             \
  inline twin::AtomicResult<T> name(T* address, T operand) {               \
    return {address,                                                       \
            [](void* memory, uint64_t operand_bits) NGRAM_TWIN_UNCHECKED { \
              T& value = *static_cast<T*>(memory);                         \
              const T old = value, x = twin::from_bits<T>(operand_bits);   \
              value = static_cast<T>(expression);                          \
              return twin::to_bits(old);                                   \
            },                                                             \
            operand};                                                      \
  }
#define NGRAM_TWIN_ATOMICS(T)         \
  NGRAM_TWIN_ATOMIC(atomicExch, T, x) \
  NGRAM_TWIN_ATOMIC(atomicMax, T, x > old ? x : old)
NGRAM_TWIN_ATOMICS(int)
NGRAM_TWIN_ATOMICS(unsigned long long)
NGRAM_TWIN_ATOMIC(atomicAdd, unsigned, old + x)
#undef NGRAM_TWIN_ATOMICS
#undef NGRAM_TWIN_ATOMIC

// The compiler's built-in atomic operations. With a smaller scope than the device, the model ignores the memory order:
// such an operation does not order accesses for other blocks.
enum { __NV_ATOMIC_RELAXED, __NV_ATOMIC_CONSUME, __NV_ATOMIC_ACQUIRE, __NV_ATOMIC_RELEASE, __NV_ATOMIC_ACQ_REL };
enum { __NV_THREAD_SCOPE_THREAD, __NV_THREAD_SCOPE_BLOCK, __NV_THREAD_SCOPE_CLUSTER, __NV_THREAD_SCOPE_DEVICE };

template <class T>
T __nv_atomic_fetch_add(T* address, T operand, int order, int scope) {
  const auto add = [](void* memory, uint64_t bits) NGRAM_TWIN_UNCHECKED {
    T& value = *static_cast<T*>(memory);
    const T old = value;
    value = static_cast<T>(old + twin::from_bits<T>(bits));
    return twin::to_bits(old);
  };
  const bool is_device_scope = scope == __NV_THREAD_SCOPE_DEVICE;
  const twin::AtomicOrder atomic_order{
      is_device_scope && (order == __NV_ATOMIC_ACQUIRE || order == __NV_ATOMIC_ACQ_REL),
      is_device_scope && (order == __NV_ATOMIC_RELEASE || order == __NV_ATOMIC_ACQ_REL)};
  return twin::from_bits<T>(twin::apply_atomic(address, sizeof(T), add, twin::to_bits(operand), atomic_order));
}

template <class T>
T __ldg(const T* address) {
  twin::check_constant_read(address, sizeof(T));
  return *address;
}

// A load that only differs from a plain load in how caches keep the data.
template <class T>
T __ldcs(const T* address) {
  return *address;
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline void __builtin_assume(bool) {}
inline bool __isGlobal(const void*) { return true; }

// Functions for host code. Unless launches are captured, a launch is complete when cudaLaunchKernelEx() returns.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
};

#define CUDART_VERSION 13000

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace twin {

// The linker defines these symbols at the ends of the section; they are null if no kernel has shared memory.
extern char shared_begin[] __asm__("__start_" NGRAM_TWIN_SHARED_SECTION) __attribute__((weak));
extern char shared_end[] __asm__("__stop_" NGRAM_TWIN_SHARED_SECTION) __attribute__((weak));

struct SharedMemory {
  char *begin, *end;

  size_t bytes() const { return static_cast<size_t>(end - begin); }
  bool contains(const void* address) const { return address >= begin && address < end; }
};

// Calls run_thread(argument) once for each thread of the grid.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, SharedMemory shared_memory,
                   void (*run_thread)(void*), void* argument);

// Calls `run`, which launches a kernel, or adds it to the graph that is being captured.
cudaError_t run_or_capture(std::function<cudaError_t()> run);

}  // namespace twin

cudaError_t cudaGetLastError();                     // returns the last error and clears it
const char* cudaGetErrorString(cudaError_t error);  // for a failed launch: the rule that the kernel broke
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared);

// Passes the shared memory of the file that calls this function. Kernels of different files must have different
// parameter types, because otherwise the linker merges the two instances of this function.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  auto call_kernel = [kernel, values = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
    std::apply(kernel, values);  // copies the values for each thread
  };
  return twin::run_or_capture([config = *config, kernel, call_kernel]() mutable {
    const auto run_thread = [](void* call) { (*static_cast<decltype(call_kernel)*>(call))(); };
    return twin::launch(config, reinterpret_cast<const void*>(kernel), {twin::shared_begin, twin::shared_end},
                        run_thread, &call_kernel);
  });
}
