// The part of CUDA that the kernels in csrc/cuda use, for an ordinary C++ compiler: found before the toolkit's header
// of this name. Device functions are plain functions; what threads do together goes to the model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <tuple>
#include <utility>

// The model of a GPU: the calls that device functions make. Every call may yield to other threads. A call by which the
// kernel breaks a rule does not return: the launch ends with an error that names the rule.

#define NGRAM_TWIN_SHARED_SECTION "ngram_twin_shared"
// The place of a call in the kernel's source, from two defaulted parameters. An address would not do: the compiler may
// duplicate code.
#define NGRAM_TWIN_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define NGRAM_TWIN_SITE (twin::Site{file, line})

namespace twin {

// Whether a function, given by its __PRETTY_FUNCTION__, is not a template instance: see __shared__.
constexpr bool keeps_shared_memory(std::string_view function) { return function.find("[with ") == function.npos; }

struct Site {
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

// A barrier of all threads of the block.
void barrier(Site site);

// The lanes in `mask`; values are passed as their bits, 32-bit ones without sign extension.
uint64_t collective(Collective kind, uint32_t mask, uint64_t value, int operand, Site site);

// A read of memory that no thread of the launch may write, before or after.
void read_constant(const void* address, int bytes);

// An atomic operation: `apply` changes *address by `operand` and returns the old value. If the result
// is not used, it may take effect later, but no later than the thread's next barrier or releasing atomic operation.
using Apply = uint64_t (*)(void* address, uint64_t operand);
// The additional order that an atomic operation establishes, device-wide.
struct Ordering {
  bool acquires = false;
  bool releases = false;
};
uint64_t atomic(void* address, int bytes, Apply apply, uint64_t operand, Ordering order = {});
void atomic_without_result(void* address, int bytes, Apply apply, uint64_t operand);

}  // namespace twin

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
// One copy in a section of its own: the model knows where shared memory lies, and swaps it when it swaps blocks. In a
// template the compiler ignores the section, and all blocks would share one copy, so that does not compile. Declare a
// kernel template's shared memory in a function of its own.
#define __shared__                                                                                                 \
  static_assert(twin::keeps_shared_memory(__PRETTY_FUNCTION__), "__shared__ in a template is not kept per block"); \
  static __attribute__((section(NGRAM_TWIN_SHARED_SECTION)))

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

// The model's own accesses must not be reported as the kernel's.
#define NGRAM_TWIN_UNWATCHED __attribute__((no_sanitize("thread", "undefined")))

namespace twin {

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 32 or 64 bits");
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

// The return value of an atomic. If it is not read, the operation has no result and may take effect late.
template <class T>
class AtomicResult {
 public:
  AtomicResult(T* address, Apply apply, T operand) : address_(address), apply_(apply), operand_(operand) {}
  AtomicResult(const AtomicResult&) = delete;
  AtomicResult& operator=(const AtomicResult&) = delete;
  ~AtomicResult() noexcept(false) {
    if (!done_) atomic_without_result(address_, sizeof(T), apply_, bits_of(operand_));
  }
  operator T() {
    if (!done_) before_ = from_bits<T>(atomic(address_, sizeof(T), apply_, bits_of(operand_)));
    done_ = true;
    return before_;
  }

 private:
  T* address_;
  Apply apply_;
  T operand_;
  T before_{};
  bool done_ = false;
};

}  // namespace twin

inline void __syncthreads(NGRAM_TWIN_CALLER) { twin::barrier(NGRAM_TWIN_SITE); }
inline void __syncwarp(unsigned mask = 0xffffffffu, NGRAM_TWIN_CALLER) {
  twin::collective(twin::Collective::kSync, mask, 0, 0, NGRAM_TWIN_SITE);
}

// One overload per type that CUDA supports, not a template: arguments convert as in CUDA.
#define NGRAM_TWIN_SHUFFLES(T)                                                                            \
  inline T __shfl_sync(unsigned mask, T value, int lane, NGRAM_TWIN_CALLER) {                             \
    return twin::from_bits<T>(                                                                            \
        twin::collective(twin::Collective::kShuffle, mask, twin::bits_of(value), lane, NGRAM_TWIN_SITE)); \
  }                                                                                                       \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, NGRAM_TWIN_CALLER) {                    \
    return twin::from_bits<T>(twin::collective(twin::Collective::kShuffleUp, mask, twin::bits_of(value),  \
                                               static_cast<int>(delta), NGRAM_TWIN_SITE));                \
  }
NGRAM_TWIN_SHUFFLES(int)
NGRAM_TWIN_SHUFFLES(unsigned)
NGRAM_TWIN_SHUFFLES(long)
NGRAM_TWIN_SHUFFLES(unsigned long)
NGRAM_TWIN_SHUFFLES(long long)
NGRAM_TWIN_SHUFFLES(unsigned long long)
#undef NGRAM_TWIN_SHUFFLES

#define NGRAM_TWIN_COLLECTIVE(result, name, T, kind)                                               \
  inline result name(unsigned mask, T value, NGRAM_TWIN_CALLER) {                                  \
    return twin::from_bits<result>(                                                                \
        twin::collective(twin::Collective::kind, mask, twin::bits_of(value), 0, NGRAM_TWIN_SITE)); \
  }
NGRAM_TWIN_COLLECTIVE(unsigned, __ballot_sync, int, kBallot)
NGRAM_TWIN_COLLECTIVE(int, __any_sync, int, kAny)
NGRAM_TWIN_COLLECTIVE(unsigned, __reduce_max_sync, unsigned, kMax)
#undef NGRAM_TWIN_COLLECTIVE

#define NGRAM_TWIN_ATOMIC(name, T, expression)                           \
  inline twin::AtomicResult<T> name(T* address, T operand) {             \
    return {address,                                                     \
            [](void* at, uint64_t operand_bits) NGRAM_TWIN_UNWATCHED {   \
              T& value = *static_cast<T*>(at);                           \
              const T old = value, x = twin::from_bits<T>(operand_bits); \
              value = static_cast<T>(expression);                        \
              return twin::bits_of(old);                                 \
            },                                                           \
            operand};                                                    \
  }
#define NGRAM_TWIN_ATOMICS(T)                        \
  NGRAM_TWIN_ATOMIC(atomicExch, T, x)                \
  NGRAM_TWIN_ATOMIC(atomicMin, T, x < old ? x : old) \
  NGRAM_TWIN_ATOMIC(atomicMax, T, x > old ? x : old)
NGRAM_TWIN_ATOMICS(int)
NGRAM_TWIN_ATOMICS(unsigned long long)
NGRAM_TWIN_ATOMIC(atomicAdd, unsigned, old + x)
#undef NGRAM_TWIN_ATOMICS
#undef NGRAM_TWIN_ATOMIC

// The compiler's own atomics. Block scope orders nothing for other blocks, and the model ignores it.
enum { __NV_ATOMIC_RELAXED, __NV_ATOMIC_CONSUME, __NV_ATOMIC_ACQUIRE, __NV_ATOMIC_RELEASE, __NV_ATOMIC_ACQ_REL };
enum { __NV_THREAD_SCOPE_THREAD, __NV_THREAD_SCOPE_BLOCK, __NV_THREAD_SCOPE_CLUSTER, __NV_THREAD_SCOPE_DEVICE };

template <class T>
T __nv_atomic_fetch_add(T* address, T operand, int order, int scope) {
  const auto add = [](void* at, uint64_t bits) NGRAM_TWIN_UNWATCHED {
    T& value = *static_cast<T*>(at);
    const T old = value;
    value = static_cast<T>(old + twin::from_bits<T>(bits));
    return twin::bits_of(old);
  };
  const bool counts = scope == __NV_THREAD_SCOPE_DEVICE;
  const twin::Ordering ordered{counts && (order == __NV_ATOMIC_ACQUIRE || order == __NV_ATOMIC_ACQ_REL),
                               counts && (order == __NV_ATOMIC_RELEASE || order == __NV_ATOMIC_ACQ_REL)};
  return twin::from_bits<T>(twin::atomic(address, sizeof(T), add, twin::bits_of(operand), ordered));
}

template <class T>
T __ldg(const T* address) {
  twin::read_constant(address, sizeof(T));
  return *address;
}

inline int __ffs(int x) { return __builtin_ffs(x); }
inline void __builtin_assume(bool) {}
inline bool __isGlobal(const void*) { return true; }

// Functions for the host side. A launch is complete when it returns.

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
};

#define CUDART_VERSION 13000

enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

namespace twin {

// Runs `thread(context)` once for each thread of the grid.
cudaError_t launch(const cudaLaunchConfig_t& config, void (*thread)(void*), void* context);

}  // namespace twin

cudaError_t cudaGetLastError();                     // and clears it
const char* cudaGetErrorString(cudaError_t error);  // of a failed launch: what the kernel did
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared);

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  auto call = [&, given = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
    std::apply(kernel, given);  // each thread has its own copy
  };
  return twin::launch(*config, [](void* context) { (*static_cast<decltype(call)*>(context))(); }, &call);
}
