// Tests the model of a GPU (grid.h) with kernels that have one fault each, and with correct kernels. Also tests that
// each operator launches its kernels on the stream that it receives. tests/repo/verify/device_faults.py tests that the
// model exposes faults of the order of blocks, threads and atomic operations, and races.
#include <sys/mman.h>

#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "core/merging.h"
#include "core/store.h"
#include "run_kernel.h"

namespace twin {
namespace {

class CudaTwin : public ::testing::TestWithParam<SimulationOptions> {
 protected:
  void SetUp() override {
    set_seed(7);
    options() = GetParam();
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, CudaTwin, ::testing::Values(kSequentialOptions, kInterleavedOptions),
                         [](const auto& mode) { return mode.param.interleaves_blocks ? "Interleaved" : "Sequential"; });

// A correct kernel: each thread writes the sum of the indices of the block's 64 threads.
__global__ void add_thread_indices(int* out, unsigned* num_blocks) {
  __shared__ int sums[2];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = static_cast<int>(threadIdx.x);
  for (int distance = 1; distance < 32; distance *= 2) {
    const int lower_sum = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
    if (lane >= distance) sum += lower_sum;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = sums[0] + sums[1];
  if (threadIdx.x == 40) return;
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(num_blocks, 1u);
}

TEST_P(CudaTwin, CorrectKernelRunsEveryThreadOfEveryBlock) {
  std::vector<int> out(7 * 64);
  unsigned num_blocks = 0;
  ASSERT_EQ(run_kernel({7, 64}, add_thread_indices, out.data(), &num_blocks), cudaSuccess);
  for (const int value : out) EXPECT_EQ(value, 63 * 64 / 2);
  EXPECT_EQ(num_blocks, 7u);
}

TEST_P(CudaTwin, BarrierDoesNotWaitForWarpsThatHaveLeft) {
  unsigned num_remaining = 0;
  const auto count_remaining_threads = +[](unsigned* count) {
    if (threadIdx.x >= 32) return;
    __syncthreads();
    atomicAdd(count, 1u);
  };
  ASSERT_EQ(run_kernel({2, 128}, count_remaining_threads, &num_remaining), cudaSuccess);
  EXPECT_EQ(num_remaining, 64u);
}

__global__ void wait_in_different_branches() {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32) __syncthreads();
}

TEST_P(CudaTwin, MisusedCollectivesAreReported) {
  expect_error("divergent barriers: thread 0", {1, 64}, wait_in_different_branches);
  expect_error(
      "deadlock: thread 0 of block (0, 0, 0) waits in __syncwarp", {1, 64}, +[] {
        if (threadIdx.x % 32 == 5) {
          __syncthreads();
        } else {
          __syncwarp();
        }
      });
  expect_error(
      "left the kernel", {1, 64}, +[] {
        if (threadIdx.x % 32 >= 20) return;
        __syncwarp(0xfffffu);
        __shfl_sync(0xffffffffu, 1, 0);
      });
  expect_error("reads lane 25, which is not in the mask", {1, 20}, +[] { __shfl_sync(0xffffffffu >> 12, 1, 25); });
  expect_error("does not contain the calling lane", {1, 32}, +[] { __ballot_sync(0xffff0000u, 1); });
  expect_error("the block does not have", {1, 40}, +[] { __syncwarp(); });
  expect_error("with mask ffff0001", {1, 32}, +[] { __syncwarp(threadIdx.x < 16 ? 0xffffffffu : 0xffff0001u); });
  expect_error(
      "in __any_sync", {1, 32}, +[] {
        if (threadIdx.x < 16) {
          __any_sync(0xffffffffu, 1);
        } else {
          __ballot_sync(0xffffffffu, 1);
        }
      });
}

TEST_P(CudaTwin, MisalignedAtomicIsReported) {
  alignas(8) char memory[8] = {};
  expect_error(
      "not aligned", {1, 1}, +[](char* aligned) { atomicAdd(reinterpret_cast<unsigned*>(aligned + 2), 1u); },
      static_cast<char*>(memory));
}

__global__ void write_item(int* items) { items[threadIdx.x] = 1; }

TEST_P(CudaTwin, WriteToReadOnlyMemoryIsReported) {
  void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expect_error("accessed memory at 0x", {1, 32}, write_item, static_cast<int*>(page));
  munmap(page, 4096);
}

TEST_P(CudaTwin, DivisionByZeroIsReported) {
  int out = 0;
  expect_error("divided by zero", {1, 1}, +[](int* quotient, int divisor) { *quotient = 7 / divisor; }, &out, 0);
}

int recurse(volatile int* depth) {
  volatile char stack_memory[1024];
  stack_memory[0] = static_cast<char>(++*depth);
  return *depth < 0 ? 0 : recurse(depth) + stack_memory[0];
}

TEST_P(CudaTwin, StackOverflowIsReported) {
  int out = 0;
  expect_error("stack is exhausted", {1, 1}, +[](int* result) { *result = recurse(result); }, &out);
}

TEST_P(CudaTwin, InvalidLaunchShapesAreRejected) {
  int out = 0;
  const auto is_rejected = [&](const LaunchShape& shape) {
    return run_kernel(shape, write_item, &out) == cudaErrorInvalidConfiguration;
  };
  EXPECT_TRUE(is_rejected({0, 32}));
  EXPECT_TRUE(is_rejected({1, 0}));
  EXPECT_TRUE(is_rejected({1, 1025}));
  EXPECT_TRUE(is_rejected({dim3(1, 65536), 32}));
  EXPECT_TRUE(is_rejected({1, 32, size_t{49} << 10}));
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

TEST_P(CudaTwin, LargeDynamicSharedMemoryMustBeAllowed) {
  const auto kernel = reinterpret_cast<const void*>(write_item);
  const auto allow = [&](int bytes) {
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  };
  int out[32] = {};
  const LaunchShape shape{1, 32, size_t{64} << 10};
  EXPECT_EQ(allow(1 << 20), cudaErrorInvalidValue);
  EXPECT_EQ(run_kernel(shape, write_item, out), cudaErrorInvalidConfiguration);
  EXPECT_EQ(allow(64 << 10), cudaSuccess);
  EXPECT_EQ(run_kernel(shape, write_item, out), cudaSuccess);
  EXPECT_EQ(allow(47 << 10), cudaSuccess);
}

}  // namespace
}  // namespace twin

using namespace ngram_npu;

namespace {

int32_t outputs[8];

// Gives an operator the least work for which it launches a kernel. Sets only the pointers that it then accesses.
template <class Params>
void set_outputs(Params& p) {
  if constexpr (std::is_same_v<Params, NgramProposeParams> || std::is_same_v<Params, NgramStepParams>) {
    p.batch = 1;
    p.num_draft_tokens = outputs;
    p.match_len = outputs + 1;
  }
  if constexpr (std::is_same_v<Params, NgramStepParams>) {
    p.sampled_token_ids.data = outputs;
    p.next_token_ids = outputs + 2;
    p.num_sampled = outputs + 3;
  }
  if constexpr (std::is_same_v<Params, PrepareInputsParams>) p.query_start_loc_out = outputs;
  if constexpr (std::is_same_v<Params, CorrectSpecStateParams>) p.slots.query_start_loc = outputs;
  if constexpr (std::is_same_v<Params, StoreAppendParams>) {
    p.workspace = outputs;
    p.allocator = outputs + 2;
  }
}

// Expects that all launches of an operator use the stream that it receives.
template <class Params>
void expect_one_stream(int32_t (*op)(const Params*, void*)) {
  Params params{};
  set_outputs(params);
  void* const stream = &params;  // any unique address
  ngram_npu_cuda_twin_set_stream(stream);
  EXPECT_EQ(op(&params, stream), kOk) << ngram_npu_cuda_twin_last_error_text();
  EXPECT_EQ(op(&params, nullptr), kLaunchFailed);  // the operator has a launch, and the twin reports its stream
  ngram_npu_cuda_twin_set_stream(nullptr);
}

}  // namespace

#define NGRAM_NPU_TEST_STREAM(op, Params)                                     \
  extern "C" int32_t ngram_npu_cuda_##op(const Params* params, void* stream); \
  TEST(CudaTwinOperators, op##LaunchesOnItsStream) { expect_one_stream(ngram_npu_cuda_##op); }

NGRAM_NPU_TEST_STREAM(prepare_next_token_ids, PrepareNextTokenIdsParams)
NGRAM_NPU_TEST_STREAM(prepare_inputs_padded, PrepareInputsPaddedParams)
NGRAM_NPU_TEST_STREAM(prepare_inputs, PrepareInputsParams)
NGRAM_NPU_TEST_STREAM(prepare_input_ids_, PrepareInputIdsParams)
NGRAM_NPU_TEST_STREAM(correct_num_computed_tokens_, CorrectNumComputedTokensParams)
NGRAM_NPU_TEST_STREAM(compute_slot_mapping_, ComputeSlotMappingParams)
NGRAM_NPU_TEST_STREAM(correct_spec_state_, CorrectSpecStateParams)
NGRAM_NPU_TEST_STREAM(ngram_propose, NgramProposeParams)
NGRAM_NPU_TEST_STREAM(ngram_step_, NgramStepParams)
NGRAM_NPU_TEST_STREAM(store_append_, StoreAppendParams)
NGRAM_NPU_TEST_STREAM(store_propose_, StoreProposeParams)
NGRAM_NPU_TEST_STREAM(merge_drafts_, MergeDraftsParams)
