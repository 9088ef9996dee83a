// CUDA's functions for device code; included by cuda_runtime.h.
#pragma once

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

// The return value of an atomic. If nobody reads it, the operation has no result and may take effect late.
template <class T>
class AtomicResult {
 public:
  AtomicResult(T* address, Apply apply, T operand, T other)
      : address_(address), apply_(apply), operand_(operand), other_(other) {}
  AtomicResult(const AtomicResult&) = delete;
  AtomicResult& operator=(const AtomicResult&) = delete;
  ~AtomicResult() noexcept(false) {
    if (!done_) atomic_without_result(address_, sizeof(T), apply_, bits_of(operand_), bits_of(other_));
  }
  operator T() {
    if (!done_) before_ = from_bits<T>(atomic(address_, sizeof(T), apply_, bits_of(operand_), bits_of(other_)));
    done_ = true;
    return before_;
  }

 private:
  T* address_;
  Apply apply_;
  T operand_, other_;
  T before_{};
  bool done_ = false;
};

}  // namespace twin

inline void __syncthreads(NGRAM_TWIN_CALLER) { twin::barrier(twin::Barrier::kSync, 0, NGRAM_TWIN_SITE); }
inline int __syncthreads_count(int predicate, NGRAM_TWIN_CALLER) {
  return twin::barrier(twin::Barrier::kCount, predicate, NGRAM_TWIN_SITE);
}
inline void __syncwarp(unsigned mask = 0xffffffffu, NGRAM_TWIN_CALLER) {
  twin::collective(twin::Collective::kSync, mask, 0, 0, warpSize, NGRAM_TWIN_SITE);
}
inline void __threadfence_block() { twin::fence(twin::Fence::kBlock); }
inline void __threadfence() { twin::fence(twin::Fence::kDevice); }

// One overload per type that CUDA supports, not a template: arguments convert as in CUDA.
#define NGRAM_TWIN_SHUFFLES(T)                                                                                       \
  inline T __shfl_sync(unsigned mask, T value, int lane, int width = warpSize, NGRAM_TWIN_CALLER) {                  \
    return twin::from_bits<T>(                                                                                       \
        twin::collective(twin::Collective::kShuffle, mask, twin::bits_of(value), lane, width, NGRAM_TWIN_SITE));     \
  }                                                                                                                  \
  inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, NGRAM_TWIN_CALLER) {         \
    return twin::from_bits<T>(twin::collective(twin::Collective::kShuffleUp, mask, twin::bits_of(value),             \
                                               static_cast<int>(delta), width, NGRAM_TWIN_SITE));                    \
  }                                                                                                                  \
  inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, NGRAM_TWIN_CALLER) {       \
    return twin::from_bits<T>(twin::collective(twin::Collective::kShuffleDown, mask, twin::bits_of(value),           \
                                               static_cast<int>(delta), width, NGRAM_TWIN_SITE));                    \
  }                                                                                                                  \
  inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, NGRAM_TWIN_CALLER) {             \
    return twin::from_bits<T>(                                                                                       \
        twin::collective(twin::Collective::kShuffleXor, mask, twin::bits_of(value), lanes, width, NGRAM_TWIN_SITE)); \
  }
NGRAM_TWIN_SHUFFLES(int)
NGRAM_TWIN_SHUFFLES(unsigned)
NGRAM_TWIN_SHUFFLES(long)
NGRAM_TWIN_SHUFFLES(unsigned long)
NGRAM_TWIN_SHUFFLES(long long)
NGRAM_TWIN_SHUFFLES(unsigned long long)
#undef NGRAM_TWIN_SHUFFLES

#define NGRAM_TWIN_COLLECTIVE(result, name, T, kind)                                                         \
  inline result name(unsigned mask, T value, NGRAM_TWIN_CALLER) {                                            \
    return twin::from_bits<result>(                                                                          \
        twin::collective(twin::Collective::kind, mask, twin::bits_of(value), 0, warpSize, NGRAM_TWIN_SITE)); \
  }
NGRAM_TWIN_COLLECTIVE(unsigned, __ballot_sync, int, kBallot)
NGRAM_TWIN_COLLECTIVE(int, __any_sync, int, kAny)
NGRAM_TWIN_COLLECTIVE(int, __all_sync, int, kAll)
NGRAM_TWIN_COLLECTIVE(unsigned, __match_any_sync, int, kMatchAny)
NGRAM_TWIN_COLLECTIVE(unsigned, __match_any_sync, unsigned, kMatchAny)
NGRAM_TWIN_COLLECTIVE(unsigned, __match_any_sync, long long, kMatchAny)
NGRAM_TWIN_COLLECTIVE(unsigned, __match_any_sync, unsigned long long, kMatchAny)
NGRAM_TWIN_COLLECTIVE(int, __reduce_add_sync, int, kAddSigned)
NGRAM_TWIN_COLLECTIVE(unsigned, __reduce_add_sync, unsigned, kAddUnsigned)
NGRAM_TWIN_COLLECTIVE(int, __reduce_min_sync, int, kMinSigned)
NGRAM_TWIN_COLLECTIVE(unsigned, __reduce_min_sync, unsigned, kMinUnsigned)
NGRAM_TWIN_COLLECTIVE(int, __reduce_max_sync, int, kMaxSigned)
NGRAM_TWIN_COLLECTIVE(unsigned, __reduce_max_sync, unsigned, kMaxUnsigned)
#undef NGRAM_TWIN_COLLECTIVE

#define NGRAM_TWIN_ATOMIC(name, T, expression)                                   \
  inline twin::AtomicResult<T> name(T* address, T operand) {                     \
    return {address,                                                             \
            [](void* at, uint64_t operand_bits, uint64_t) NGRAM_TWIN_UNWATCHED { \
              T& value = *static_cast<T*>(at);                                   \
              const T old = value, x = twin::from_bits<T>(operand_bits);         \
              value = static_cast<T>(expression);                                \
              return twin::bits_of(old);                                         \
            },                                                                   \
            operand, static_cast<T>(0)};                                         \
  }
#define NGRAM_TWIN_ATOMICS(T)                        \
  NGRAM_TWIN_ATOMIC(atomicExch, T, x)                \
  NGRAM_TWIN_ATOMIC(atomicMin, T, x < old ? x : old) \
  NGRAM_TWIN_ATOMIC(atomicMax, T, x > old ? x : old) \
  NGRAM_TWIN_ATOMIC(atomicAnd, T, old& x)            \
  NGRAM_TWIN_ATOMIC(atomicOr, T, old | x)
NGRAM_TWIN_ATOMICS(int)
NGRAM_TWIN_ATOMICS(unsigned)
NGRAM_TWIN_ATOMICS(unsigned long long)
NGRAM_TWIN_ATOMIC(atomicMin, long long, x < old ? x : old)
NGRAM_TWIN_ATOMIC(atomicMax, long long, x > old ? x : old)
NGRAM_TWIN_ATOMIC(atomicAdd, int, static_cast<unsigned>(old) + static_cast<unsigned>(x))
NGRAM_TWIN_ATOMIC(atomicAdd, unsigned, old + x)
NGRAM_TWIN_ATOMIC(atomicAdd, unsigned long long, old + x)
NGRAM_TWIN_ATOMIC(atomicSub, int, static_cast<unsigned>(old) - static_cast<unsigned>(x))
NGRAM_TWIN_ATOMIC(atomicSub, unsigned, old - x)
NGRAM_TWIN_ATOMIC(atomicInc, unsigned, old >= x ? 0 : old + 1)
NGRAM_TWIN_ATOMIC(atomicDec, unsigned, old == 0 || old > x ? x : old - 1)
#undef NGRAM_TWIN_ATOMICS
#undef NGRAM_TWIN_ATOMIC

#define NGRAM_TWIN_CAS(T)                                                                             \
  inline twin::AtomicResult<T> atomicCAS(T* address, T expected, T desired) {                         \
    return {address,                                                                                  \
            [](void* at, uint64_t expected_bits, uint64_t desired_bits) NGRAM_TWIN_UNWATCHED {        \
              T& value = *static_cast<T*>(at);                                                        \
              const T old = value;                                                                    \
              if (old == twin::from_bits<T>(expected_bits)) value = twin::from_bits<T>(desired_bits); \
              return twin::bits_of(old);                                                              \
            },                                                                                        \
            expected, desired};                                                                       \
  }
NGRAM_TWIN_CAS(int)
NGRAM_TWIN_CAS(unsigned)
NGRAM_TWIN_CAS(unsigned long long)
#undef NGRAM_TWIN_CAS

// The compiler's own atomics. Block scope orders nothing for other blocks, and the model ignores it.
enum { __NV_ATOMIC_RELAXED, __NV_ATOMIC_CONSUME, __NV_ATOMIC_ACQUIRE, __NV_ATOMIC_RELEASE, __NV_ATOMIC_ACQ_REL };
enum { __NV_THREAD_SCOPE_THREAD, __NV_THREAD_SCOPE_BLOCK, __NV_THREAD_SCOPE_CLUSTER, __NV_THREAD_SCOPE_DEVICE };

template <class T>
T __nv_atomic_fetch_add(T* address, T operand, int order, int scope) {
  const auto add = [](void* at, uint64_t bits, uint64_t) NGRAM_TWIN_UNWATCHED {
    T& value = *static_cast<T*>(at);
    const T old = value;
    value = static_cast<T>(old + twin::from_bits<T>(bits));
    return twin::bits_of(old);
  };
  const bool counts = scope == __NV_THREAD_SCOPE_DEVICE;
  const twin::Ordering ordered{counts && (order == __NV_ATOMIC_ACQUIRE || order == __NV_ATOMIC_ACQ_REL),
                               counts && (order == __NV_ATOMIC_RELEASE || order == __NV_ATOMIC_ACQ_REL)};
  return twin::from_bits<T>(twin::atomic(address, sizeof(T), add, twin::bits_of(operand), 0, ordered));
}

template <class T>
T __ldg(const T* address) {
  twin::read_constant(address, sizeof(T));
  return *address;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const unsigned s = shift & 31u;
  return s == 0 ? high : high << s | low >> (32 - s);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const unsigned s = shift & 31u;
  return s == 0 ? low : low >> s | high << (32 - s);
}
inline void __builtin_assume(bool) {}
inline bool __isGlobal(const void*) { return true; }

// Mixed signs give the unsigned type, as in CUDA.
#define NGRAM_TWIN_MIN_MAX(R, A, B)                                                                                \
  inline R min(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(a) : static_cast<R>(b); } \
  inline R max(A a, B b) { return static_cast<R>(a) < static_cast<R>(b) ? static_cast<R>(b) : static_cast<R>(a); }
#define NGRAM_TWIN_MIN_MAX_OF(S, U) \
  NGRAM_TWIN_MIN_MAX(S, S, S)       \
  NGRAM_TWIN_MIN_MAX(U, U, U)       \
  NGRAM_TWIN_MIN_MAX(U, S, U)       \
  NGRAM_TWIN_MIN_MAX(U, U, S)
NGRAM_TWIN_MIN_MAX_OF(int, unsigned)
NGRAM_TWIN_MIN_MAX_OF(long, unsigned long)
NGRAM_TWIN_MIN_MAX_OF(long long, unsigned long long)
#undef NGRAM_TWIN_MIN_MAX_OF
#undef NGRAM_TWIN_MIN_MAX
