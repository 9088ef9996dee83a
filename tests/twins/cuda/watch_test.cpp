// Kernels that access memory wrongly, each in one way, and correct ones. This file is compiled to report its accesses.
#include "launching.h"

namespace twin {
namespace {

enum class Order { kNone, kBarrier, kSyncwarp };

void wait(Order order) {
  if (order == Order::kBarrier) __syncthreads();
  if (order == Order::kSyncwarp) __syncwarp();
}

// Each thread reads what the next one wrote.
__global__ void neighbour(int* out, int* staging, Order order) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  staging[i] = static_cast<int>(i);
  wait(order);
  out[i] = staging[blockIdx.x * blockDim.x + (threadIdx.x + 1) % blockDim.x];
}

__global__ void neighbour_in_shared_memory(int* out, Order order) {
  __shared__ int staging[64];
  staging[threadIdx.x] = 1;
  wait(order);
  out[blockIdx.x * blockDim.x + threadIdx.x] = staging[(threadIdx.x + 1) % blockDim.x];
}

__global__ void overwrites_what_others_read(int* at, int* out, Order order) {
  out[threadIdx.x] = *at;
  wait(order);
  if (threadIdx.x == 0) *at = 1;
}

// The last block reads what all wrote.
__global__ void last_block_acquires(int* from_all, unsigned* arrived, int* out, int order, int scope,
                                    bool has_barrier = true) {
  __shared__ bool last;
  from_all[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (has_barrier) __syncthreads();
  if (threadIdx.x == 0) last = __nv_atomic_fetch_add(arrived, 1u, order, scope) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  out[threadIdx.x] = from_all[threadIdx.x] + from_all[(gridDim.x - 1) * blockDim.x + threadIdx.x];
  if (threadIdx.x == 0) *arrived = 0;
}

__global__ void same_word_twice(int* out) { *out = 1; }

// Two blocks: one writes an item, one reads an item as constant.
__global__ void constant_and_written(int* at, int written, int read, int* out) {
  if (blockIdx.x == 0) {
    at[written] = 1;
  } else {
    *out = __ldg(at + read);
  }
}

__global__ void shuffle_is_no_barrier(int* staging) {
  staging[threadIdx.x] = 1;
  const int source = __shfl_up_sync(~0u, static_cast<int>(threadIdx.x), 1);
  staging[32 + threadIdx.x] = staging[source];
}
__global__ void volatile_read_twice(unsigned* at, unsigned* differed) {
  const volatile unsigned* shown = at;
  if (blockIdx.x == 0) {
    atomicAdd(at, 1u);
  } else if (*shown != *shown) {
    atomicAdd(differed, 1u);
  }
}
__global__ void atomic_and_plain(unsigned* out) {
  if (threadIdx.x == 0) {
    out[1] = out[0];
  } else {
    atomicAdd(out, 1u);
  }
}
__global__ void plain_reads(int* at, int* differed) {
  int seen = 0;
  for (int i = 0; i < 32; ++i) {
    if (blockIdx.x == 0) {
      at[i] = 1;
    } else {
      seen += at[i];
    }
  }
  if (seen % 32 != 0) *differed = 1;
}
__global__ void reads_row(const int* at, int index, int* out) { *out = at[index]; }
__global__ void writes_row(int* at, int index) { at[index] = 1; }
__global__ void loads_vector(const char* at, int4* out) { *out = *reinterpret_cast<const int4*>(at); }
__global__ void adds(int a, int b, int* out) { *out = a + b; }
__global__ void shifts(int by, int* out) { *out = 1 << by; }
__global__ void array_of_three(int index, int* out) {
  __shared__ int three[3];
  three[index] = index;
  *out = three[index];
}

class CudaTwinWatch : public ::testing::Test {
 protected:
  void SetUp() override {
    set_seed(7);
    options() = kHooks;
  }
  void TearDown() override {
    ngram_npu_cuda_twin_forget_tensors();
    ngram_npu_cuda_twin_allow_races(0);
  }

  int* ints() { return ints_.data(); }

  std::vector<int> ints_ = std::vector<int>(1024);
  std::vector<int> staging_ = std::vector<int>(1024);
  unsigned counter_ = 0;
};

TEST_F(CudaTwinWatch, BarrierOrdersABlock) {
  expect_right({3, 64}, neighbour, ints(), staging_.data(), Order::kBarrier);
  expect_right({3, 64}, neighbour_in_shared_memory, ints(), Order::kBarrier);
  expect_right({1, 64}, overwrites_what_others_read, ints(), staging_.data(), Order::kBarrier);
}

TEST_F(CudaTwinWatch, SyncwarpOrdersOnlyAWarp) {
  expect_right({3, 32}, neighbour, ints(), staging_.data(), Order::kSyncwarp);
  expect_right({3, 32}, neighbour_in_shared_memory, ints(), Order::kSyncwarp);
  expect_right({1, 32}, overwrites_what_others_read, ints(), staging_.data(), Order::kSyncwarp);
  expect_caught("race: ", {3, 64}, neighbour, ints(), staging_.data(), Order::kSyncwarp);
  expect_caught("race: ", {3, 64}, overwrites_what_others_read, ints(), staging_.data(), Order::kSyncwarp);
}

TEST_F(CudaTwinWatch, UnorderedAccessesAreARace) {
  expect_caught("global memory", {1, 32}, neighbour, ints(), staging_.data(), Order::kNone);
  // A read before any write, or after one but unordered.
  expect_caught("shared memory", {1, 32}, neighbour_in_shared_memory, ints(), Order::kNone);
  expect_caught("race: ", {1, 32}, overwrites_what_others_read, ints(), staging_.data(), Order::kNone);
  expect_caught("race: ", {1, 32}, shuffle_is_no_barrier, ints());
  expect_caught("race: ", {1, 32}, same_word_twice, ints());
  expect_caught("race: ", {32, 1}, same_word_twice, ints());
}

TEST_F(CudaTwinWatch, LastBlockNeedsABarrierAndAnAtomicThatAcquiresAndReleases) {
  const auto result = [this](int order, int scope, bool has_barrier = true) {
    counter_ = 0;
    return run({5, 64}, last_block_acquires, staging_.data(), &counter_, ints(), order, scope, has_barrier);
  };
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(result(__NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE), cudaSuccess);
    EXPECT_EQ(result(__NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE, false), cudaErrorLaunchFailure);
  }
  EXPECT_EQ(result(__NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_BLOCK), cudaErrorLaunchFailure);
  for (const int order : {__NV_ATOMIC_ACQUIRE, __NV_ATOMIC_RELEASE, __NV_ATOMIC_RELAXED}) {
    EXPECT_EQ(result(order, __NV_THREAD_SCOPE_DEVICE), cudaErrorLaunchFailure);
  }
}

TEST_F(CudaTwinWatch, WriteOfConstantMemoryIsReported) {
  expect_right({2, 1}, constant_and_written, ints(), 3, 4, &staging_[0]);
  expect_caught("constant", {2, 1}, constant_and_written, ints(), 3, 3, &staging_[0]);
}

TEST_F(CudaTwinWatch, VolatileValueMayChange) {
  unsigned differed = 0;
  for (int i = 0; i < 200; ++i) ASSERT_EQ(run({2, 1}, volatile_read_twice, &counter_, &differed), cudaSuccess);
  EXPECT_GT(differed, 0u);
}

TEST_F(CudaTwinWatch, PlainReadOfAnAtomicIsARace) {
  expect_caught("race: ", {1, 32}, atomic_and_plain, reinterpret_cast<unsigned*>(ints()));
  expect_right(
      {1, 32},
      +[](unsigned* out, unsigned* seen) {
        if (threadIdx.x == 0) {
          *seen = *static_cast<volatile unsigned*>(out);
        } else {
          atomicAdd(out, 1u);
        }
      },
      reinterpret_cast<unsigned*>(ints()), &counter_);
}

TEST_F(CudaTwinWatch, AllowedRacesAreNotReported) {
  ngram_npu_cuda_twin_allow_races(1);
  expect_right({32, 1}, same_word_twice, ints());
}

TEST_F(CudaTwinWatch, PlainValueMayChange) {
  ngram_npu_cuda_twin_allow_races(1);
  int differed = 0;
  expect_wrong_in_some_order([&] {
    differed = 0;
    std::fill_n(ints(), 32, 0);
    return run({2, 1}, plain_reads, ints(), &differed) == cudaSuccess && differed != 0;
  });
}

TEST_F(CudaTwinWatch, UnwrittenSharedMemoryIsReported) {
  expect_caught(
      "at offset", {1, 64},
      +[](int* out) {
        __shared__ int mine[64];
        if (threadIdx.x != 7) mine[threadIdx.x] = 1;
        out[threadIdx.x] = mine[threadIdx.x];
      },
      ints());
}

// Rows of three elements in a buffer with rows of five, starting at element one.
TEST_F(CudaTwinWatch, AccessOutsideTheTensorsIsReported) {
  int buffer[15] = {};
  int out = 0;
  const int64_t item = sizeof(int);
  const auto give = [&](int writable) {
    ngram_npu_cuda_twin_forget_tensors();
    ngram_npu_cuda_twin_register_tensor(buffer, 15 * item, buffer + 1, 2, 3 * item, 5 * item, writable);
  };
  give(0);
  for (int i = 0; i < 15; ++i) {
    const bool inside = i < 10 && i % 5 >= 1 && i % 5 <= 3;
    const cudaError_t read = run({1, 1}, reads_row, static_cast<const int*>(buffer), i, &out);
    EXPECT_EQ(read, inside ? cudaSuccess : cudaErrorLaunchFailure) << i;
    EXPECT_EQ(run({1, 1}, writes_row, static_cast<int*>(buffer), i), cudaErrorLaunchFailure) << i;
    give(1);
    const cudaError_t write = run({1, 1}, writes_row, static_cast<int*>(buffer), i);
    EXPECT_EQ(write, inside ? cudaSuccess : cudaErrorLaunchFailure) << i;
    give(0);
  }
}

TEST_F(CudaTwinWatch, MisalignedVectorIsReported) {
  alignas(16) const char memory[64] = {};
  int4 out{};
  expect_right({1, 1}, loads_vector, memory + 16, &out);
  expect_caught("is not aligned", {1, 1}, loads_vector, memory + 8, &out);
}

TEST_F(CudaTwinWatch, UndefinedBehaviourIsReported) {
  expect_right({1, 1}, array_of_three, 2, ints());
  expect_caught("out_of_bounds", {1, 1}, array_of_three, 3, ints());
  expect_right({1, 1}, adds, INT32_MAX, -1, ints());
  expect_caught("add_overflow", {1, 1}, adds, INT32_MAX, 1, ints());
  expect_caught("shift_out_of_bounds", {1, 1}, shifts, 32, ints());
}

}  // namespace
}  // namespace twin
