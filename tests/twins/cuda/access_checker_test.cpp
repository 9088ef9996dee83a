// Tests the checks of memory accesses (access_checker.h) with kernels that have one fault each, and with correct
// kernels. This file is compiled with the hooks, so that the accesses of its kernels are checked.
#include "run_kernel.h"

namespace twin {
namespace {

enum class Synchronization { kNone, kBarrier, kSyncwarp };

void synchronize(Synchronization synchronization) {
  if (synchronization == Synchronization::kBarrier) __syncthreads();
  if (synchronization == Synchronization::kSyncwarp) __syncwarp();
}

// Each thread reads the value that the next thread of its block wrote.
__global__ void read_neighbour(int* out, int* staging, Synchronization synchronization) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  staging[i] = static_cast<int>(i);
  synchronize(synchronization);
  out[i] = staging[blockIdx.x * blockDim.x + (threadIdx.x + 1) % blockDim.x];
}

__global__ void read_neighbour_in_shared_memory(int* out, Synchronization synchronization) {
  __shared__ int staging[64];
  staging[threadIdx.x] = 1;
  synchronize(synchronization);
  out[blockIdx.x * blockDim.x + threadIdx.x] = staging[(threadIdx.x + 1) % blockDim.x];
}

// The same with dynamic shared memory, whose item `offset` items after the neighbour's is read.
__global__ void read_neighbour_in_dynamic_memory(int* out, Synchronization synchronization, int offset) {
  int* const staging = reinterpret_cast<int*>(dynamic_shared_memory);
  staging[threadIdx.x] = static_cast<int>(threadIdx.x);
  synchronize(synchronization);
  const unsigned neighbour = (threadIdx.x + 1) % blockDim.x;
  out[blockIdx.x * blockDim.x + threadIdx.x] = staging[static_cast<int>(neighbour) + offset];
}

__global__ void overwrite_read_value(int* address, int* out, Synchronization synchronization) {
  out[threadIdx.x] = *address;
  synchronize(synchronization);
  if (threadIdx.x == 0) *address = 1;
}

// The block that arrives last reads values of the first and the last block.
__global__ void add_in_last_block(int* values, unsigned* num_arrived, int* out, bool has_barrier) {
  __shared__ bool is_last;
  values[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (has_barrier) __syncthreads();
  if (threadIdx.x == 0) {
    is_last = __nv_atomic_fetch_add(num_arrived, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last) return;
  out[threadIdx.x] = values[threadIdx.x] + values[(gridDim.x - 1) * blockDim.x + threadIdx.x];
}

__global__ void write_same_word(int* out) { *out = 1; }

__global__ void read_after_shuffle(int* staging) {
  staging[threadIdx.x] = 1;
  const int source = __shfl_up_sync(~0u, static_cast<int>(threadIdx.x), 1);
  staging[32 + threadIdx.x] = staging[source];
}
__global__ void read_while_adding(unsigned* out) {
  if (threadIdx.x == 0) {
    out[1] = out[0];
  } else {
    atomicAdd(out, 1u);
  }
}
__global__ void read_while_writing(int* items, int* has_changed) {
  int sum = 0;
  for (int i = 0; i < 32; ++i) {
    if (blockIdx.x == 0) {
      items[i] = 1;
    } else {
      sum += items[i];
    }
  }
  if (sum % 32 != 0) *has_changed = 1;
}
__global__ void read_item(const int* items, int index, int* out) { *out = items[index]; }
__global__ void write_item(int* items, int index) { items[index] = 1; }
__global__ void load_vector(const char* address, int4* out) { *out = *reinterpret_cast<const int4*>(address); }
__global__ void add(int a, int b, int* out) { *out = a + b; }
__global__ void shift_left(int num_bits, int* out) { *out = 1 << num_bits; }
__global__ void access_array_of_three(int index, int* out) {
  __shared__ int items[3];
  items[index] = index;
  *out = items[index];
}

class CudaTwinAccessChecker : public ::testing::Test {
 protected:
  void SetUp() override {
    set_seed(7);
    options() = kCheckedAccessesOptions;
  }
  void TearDown() override {
    ngram_npu_cuda_twin_clear_tensors();
    ngram_npu_cuda_twin_allow_races(0);
  }

  int* ints() { return ints_.data(); }

  std::vector<int> ints_ = std::vector<int>(1024);
  std::vector<int> staging_ = std::vector<int>(1024);
  unsigned counter_ = 0;
};

TEST_F(CudaTwinAccessChecker, BarrierOrdersAccessesOfBlock) {
  expect_success({3, 64}, read_neighbour, ints(), staging_.data(), Synchronization::kBarrier);
  expect_success({3, 64}, read_neighbour_in_shared_memory, ints(), Synchronization::kBarrier);
  expect_success({1, 64}, overwrite_read_value, ints(), staging_.data(), Synchronization::kBarrier);
}

TEST_F(CudaTwinAccessChecker, SyncwarpOrdersAccessesOfOneWarpOnly) {
  expect_success({3, 32}, read_neighbour, ints(), staging_.data(), Synchronization::kSyncwarp);
  expect_success({3, 32}, read_neighbour_in_shared_memory, ints(), Synchronization::kSyncwarp);
  expect_success({1, 32}, overwrite_read_value, ints(), staging_.data(), Synchronization::kSyncwarp);
  expect_error("race: ", {3, 64}, read_neighbour, ints(), staging_.data(), Synchronization::kSyncwarp);
  expect_error("race: ", {3, 64}, overwrite_read_value, ints(), staging_.data(), Synchronization::kSyncwarp);
}

TEST_F(CudaTwinAccessChecker, UnorderedAccessesAreReportedAsRace) {
  expect_error("global memory", {1, 32}, read_neighbour, ints(), staging_.data(), Synchronization::kNone);
  // In some orders the read precedes all writes: the error is then a read of unwritten shared memory, not a race.
  expect_error("shared memory", {1, 32}, read_neighbour_in_shared_memory, ints(), Synchronization::kNone);
  expect_error("race: ", {1, 32}, overwrite_read_value, ints(), staging_.data(), Synchronization::kNone);
  expect_error("race: ", {1, 32}, read_after_shuffle, ints());
  expect_error("race: ", {1, 32}, write_same_word, ints());
  expect_error("race: ", {32, 1}, write_same_word, ints());
  expect_error("race: ", {1, 32}, read_while_adding, reinterpret_cast<unsigned*>(ints()));
}

TEST_F(CudaTwinAccessChecker, AtomicReleasesAccessesOfBlockOnlyAfterBarrier) {
  for (int i = 0; i < 20; ++i) {
    for (const bool has_barrier : {true, false}) {
      counter_ = 0;
      EXPECT_EQ(run_kernel({5, 64}, add_in_last_block, staging_.data(), &counter_, ints(), has_barrier),
                has_barrier ? cudaSuccess : cudaErrorLaunchFailure);
    }
  }
}

TEST_F(CudaTwinAccessChecker, AllowedRaceIsNotReportedAndChangesValueBetweenReads) {
  ngram_npu_cuda_twin_allow_races(1);
  int has_changed = 0;
  expect_wrong_result_in_some_order([&] {
    has_changed = 0;
    std::fill_n(ints(), 32, 0);
    return run_kernel({2, 1}, read_while_writing, ints(), &has_changed) == cudaSuccess && has_changed != 0;
  });
}

TEST_F(CudaTwinAccessChecker, DynamicSharedMemoryIsCheckedPerBlock) {
  const LaunchShape shape{3, 64, 64 * sizeof(int)};
  expect_success(shape, read_neighbour_in_dynamic_memory, ints(), Synchronization::kBarrier, 0);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(ints()[i], (i + 1) % 64);
  const auto expect_kernel_error = [&](const std::string& message, size_t bytes, Synchronization how, int offset) {
    const LaunchShape faulty_shape{1, 64, bytes};
    expect_error(message, faulty_shape, read_neighbour_in_dynamic_memory, ints(), how, offset);
  };
  expect_kernel_error("shared memory", 64 * sizeof(int), Synchronization::kNone, 0);
  expect_kernel_error("which no thread wrote", 65 * sizeof(int), Synchronization::kBarrier, 1);
  expect_kernel_error("next to the dynamic shared memory", 64 * sizeof(int), Synchronization::kBarrier, 1);
  expect_kernel_error("next to the dynamic shared memory", 64 * sizeof(int), Synchronization::kBarrier, -64);
}

// The tensor has two rows of three elements, at elements 1 and 6 of a buffer: the buffer's elements 1 to 3 and 6 to 8.
TEST_F(CudaTwinAccessChecker, AccessOutsideTensorIsReported) {
  int buffer[15] = {};
  int out = 0;
  const int64_t item = sizeof(int);
  const auto register_rows = [&](int writable) {
    ngram_npu_cuda_twin_clear_tensors();
    ngram_npu_cuda_twin_register_tensor(buffer, 15 * item, buffer + 1, 2, 3 * item, 5 * item, writable);
  };
  register_rows(0);
  for (int i = 0; i < 15; ++i) {
    const bool is_inside = i < 10 && i % 5 >= 1 && i % 5 <= 3;
    const cudaError_t read = run_kernel({1, 1}, read_item, static_cast<const int*>(buffer), i, &out);
    EXPECT_EQ(read, is_inside ? cudaSuccess : cudaErrorLaunchFailure) << i;
    EXPECT_EQ(run_kernel({1, 1}, write_item, static_cast<int*>(buffer), i), cudaErrorLaunchFailure) << i;
    register_rows(1);
    const cudaError_t write = run_kernel({1, 1}, write_item, static_cast<int*>(buffer), i);
    EXPECT_EQ(write, is_inside ? cudaSuccess : cudaErrorLaunchFailure) << i;
    register_rows(0);
  }
}

TEST_F(CudaTwinAccessChecker, MisalignedVectorLoadIsReported) {
  alignas(16) const char memory[64] = {};
  int4 out{};
  expect_success({1, 1}, load_vector, memory + 16, &out);
  expect_error("is not aligned", {1, 1}, load_vector, memory + 8, &out);
}

TEST_F(CudaTwinAccessChecker, UndefinedBehaviourIsReported) {
  expect_success({1, 1}, access_array_of_three, 2, ints());
  expect_error("out_of_bounds", {1, 1}, access_array_of_three, 3, ints());
  expect_success({1, 1}, add, INT32_MAX, -1, ints());
  expect_error("add_overflow", {1, 1}, add, INT32_MAX, 1, ints());
  expect_error("shift_out_of_bounds", {1, 1}, shift_left, 32, ints());
}

}  // namespace
}  // namespace twin
