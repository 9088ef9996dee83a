// Kernels that are wrong, each in one way, and the model's message for each.
#include <sys/mman.h>

#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "launching.h"

namespace twin {
namespace {

class CudaTwin : public ::testing::TestWithParam<SimulationOptions> {
 protected:
  void SetUp() override {
    set_seed(7);
    options() = GetParam();
  }
};

INSTANTIATE_TEST_SUITE_P(Modes, CudaTwin, ::testing::Values(kFast, kResident),
                         [](const auto& mode) { return mode.param.interleaves_blocks ? "Resident" : "Fast"; });

// A correct kernel must pass.
__global__ void right(int* out, unsigned* counter) {
  __shared__ int sums[2];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  int sum = static_cast<int>(threadIdx.x);
  for (int d = 1; d < 32; d *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(d));
    if (lane >= d) sum += before;
  }
  if (lane == 31) sums[warp] = sum;
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = sums[0] + sums[1];
  if (threadIdx.x == 40) return;
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(counter, 1u);
}

TEST_P(CudaTwin, RunsEveryThreadOfEveryBlock) {
  std::vector<int> out(7 * 64);
  unsigned counter = 0;
  ASSERT_EQ(run({7, 64}, right, out.data(), &counter), cudaSuccess);
  for (const int value : out) EXPECT_EQ(value, 63 * 64 / 2);
  EXPECT_EQ(counter, 7u);
}

__global__ void barrier_in_a_branch() {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x >= 32) __syncthreads();
}

TEST_P(CudaTwin, MisusedCollectivesAreReported) {
  expect_caught("divergent barriers: thread 0", {}, barrier_in_a_branch);
  expect_caught(
      "deadlock: thread 0 of block (0, 0, 0) waits in __syncwarp", {}, +[] {
        if (threadIdx.x % 32 == 5) {
          __syncthreads();
        } else {
          __syncwarp();
        }
      });
  expect_caught(
      "left the kernel", {}, +[] {
        if (threadIdx.x % 32 >= 20) return;
        __syncwarp(0xfffffu);
        __shfl_sync(0xffffffffu, 1, 0);
      });
  expect_caught("reads lane 25, which is not in the mask", {1, 20}, +[] { __shfl_sync(0xffffffffu >> 12, 1, 25); });
  expect_caught("without its own lane", {1, 32}, +[] { __ballot_sync(0xffff0000u, 1); });
  expect_caught("the block does not have", {1, 40}, +[] { __syncwarp(); });
  expect_caught("with mask ffff0001", {1, 32}, +[] { __syncwarp(threadIdx.x < 16 ? 0xffffffffu : 0xffff0001u); });
  expect_caught(
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
  expect_caught(
      "not aligned", {1, 1}, +[](char* at) { atomicAdd(reinterpret_cast<unsigned*>(at + 2), 1u); },
      static_cast<char*>(memory));
}

__global__ void writes(int* at) { at[threadIdx.x] = 1; }

TEST_P(CudaTwin, ForbiddenMemoryIsReported) {
  void* page = mmap(nullptr, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  expect_caught("touched memory at 0x", {1, 32}, writes, static_cast<int*>(page));
  munmap(page, 4096);
}

TEST_P(CudaTwin, DivisionByZeroIsReported) {
  int out = 0;
  expect_caught("divided by zero", {1, 1}, +[](int* quotient, int by) { *quotient = 7 / by; }, &out, 0);
}

int recurse(volatile int* depth) {
  volatile char fill[1024];
  fill[0] = static_cast<char>(++*depth);
  return *depth < 0 ? 0 : recurse(depth) + fill[0];
}

TEST_P(CudaTwin, StackOverflowIsReported) {
  int out = 0;
  expect_caught("stack is exhausted", {1, 1}, +[](int* result) { *result = recurse(result); }, &out);
}

TEST_P(CudaTwin, InvalidLaunchShapesAreRejected) {
  int out = 0;
  const auto refused = [&](const Launch& shape) { return run(shape, writes, &out) == cudaErrorInvalidConfiguration; };
  EXPECT_TRUE(refused({0, 32}));
  EXPECT_TRUE(refused({1, 0}));
  EXPECT_TRUE(refused({1, 1025}));
  EXPECT_TRUE(refused({dim3(1, 65536), 32}));
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
}

__global__ void no_barrier(int* out) {
  __shared__ int first;
  if (threadIdx.x == 0) first = 42;
  *(out + threadIdx.x) = *static_cast<volatile int*>(&first);
}

TEST_P(CudaTwin, MissingBarrierShowsInSomeOrder) {
  expect_wrong_in_some_order([] {
    int out[64];
    return run({}, no_barrier, out) != cudaSuccess || std::vector<int>(out, out + 64) != std::vector<int>(64, 42);
  });
}

__global__ void block_before(int* out) {
  if (blockIdx.x == 0) out[0] = 5;
  if (blockIdx.x == 1) out[1] = *static_cast<volatile int*>(out);
}

TEST_P(CudaTwin, DependencyBetweenBlocksShowsInSomeOrder) {
  expect_wrong_in_some_order([] {
    int out[2] = {};
    return run({2, 1}, block_before, static_cast<int*>(out)) != cudaSuccess || out[1] != 5;
  });
}

// The last block adds up all blocks' values, which may not have arrived yet unless the arrivals release them.
template <int kOrder>
__global__ void last_block_adds(unsigned* total, unsigned* arrived, unsigned* out) {
  atomicAdd(total, blockIdx.x + 1);
  if (__nv_atomic_fetch_add(arrived, 1u, kOrder, __NV_THREAD_SCOPE_DEVICE) == gridDim.x - 1)
    *out = atomicAdd(total, 0u);
}

template <int kOrder>
bool adds_wrongly() {
  unsigned total = 0, arrived = 0, out = 0;
  return run({6, 1}, last_block_adds<kOrder>, &total, &arrived, &out) != cudaSuccess || out != 21;
}

TEST(CudaTwinResident, MissingReleaseShows) {
  options() = kResident;
  expect_wrong_in_some_order(adds_wrongly<__NV_ATOMIC_RELAXED>);
  for (int i = 0; i < 200; ++i) EXPECT_FALSE(adds_wrongly<__NV_ATOMIC_ACQ_REL>());
}

// Each block has the total as of its own turn. The last to arrive has all of it, unless another block took its turn
// and arrived in between, however much later.
__global__ void last_block_remembers(unsigned* total, unsigned* arrived, unsigned* out) {
  for (unsigned i = 0; i < 400 * blockIdx.x; ++i) __syncthreads();
  const unsigned mine = atomicAdd(total, blockIdx.x + 1) + blockIdx.x + 1;
  if (atomicAdd(arrived, 1u) == gridDim.x - 1) *out = mine;
}

TEST(CudaTwinResident, BlockMayPassAnother) {
  options() = kResident;
  expect_wrong_in_some_order([] {
    unsigned total = 0, arrived = 0, out = 0;
    return run({2, 1}, last_block_remembers, &total, &arrived, &out) != cudaSuccess || out != 3;
  });
}

// The blocks of a row must overlap in time, or a run tests nothing about how they cooperate.
TEST(CudaTwinResident, BlockOverlapsAreCounted) {
  const auto count = [](const SimulationOptions& mode) {
    options() = mode;
    const BlockOverlapCounts before = block_overlap_counts();
    for (int i = 0; i < 50; ++i) EXPECT_FALSE(adds_wrongly<__NV_ATOMIC_ACQ_REL>());
    const BlockOverlapCounts& after = block_overlap_counts();
    return std::vector<int64_t>{after.launches_sharing_a_word - before.launches_sharing_a_word,
                                after.launches_with_overlap - before.launches_with_overlap};
  };
  const auto resident = count(kResident);
  EXPECT_EQ(resident[0], 50);
  EXPECT_GT(resident[1], 40);
  EXPECT_EQ(count(kFast), (std::vector<int64_t>{0, 0}));
}

TEST(CudaTwinTest, StreamsAreRecorded) {
  ngram_npu_cuda_twin_streams(nullptr, 0);
  int out[32] = {}, stream = 0;
  ASSERT_EQ(run({1, 32}, writes, out), cudaSuccess);
  cudaLaunchConfig_t config{};
  config.gridDim = config.blockDim = 1;
  config.stream = reinterpret_cast<cudaStream_t>(&stream);
  ASSERT_EQ(cudaLaunchKernelEx(&config, writes, out), cudaSuccess);
  void* seen[3];
  EXPECT_EQ(ngram_npu_cuda_twin_streams(seen, 3), 2);
  EXPECT_EQ(seen[0], nullptr);
  EXPECT_EQ(seen[1], &stream);
  EXPECT_EQ(ngram_npu_cuda_twin_streams(seen, 3), 0);
}

__global__ void reads_unwritten_memory(unsigned* out) {
  __shared__ unsigned mine[64];
  out[threadIdx.x] = static_cast<volatile unsigned*>(mine)[threadIdx.x];
}

TEST_P(CudaTwin, SharedMemoryBeginsWithArbitraryValues) {
  expect_wrong_in_some_order([] {
    unsigned out[64];
    return run({}, reads_unwritten_memory, out) != cudaSuccess || out[3] != 0;
  });
}

}  // namespace
}  // namespace twin

// All launches of an operator go to the stream that it receives.
using namespace ngram_npu;

namespace {

// No work, or as little as an operator accepts.
int32_t out[8];
template <class Params>
void set_outputs(Params& p) {
  if constexpr (std::is_same_v<Params, NgramProposeParams> || std::is_same_v<Params, NgramStepParams>) {
    p.batch = 1;
    p.num_draft_tokens = out;
    p.match_len = out + 1;
  }
  if constexpr (std::is_same_v<Params, NgramStepParams>) {
    p.sampled_token_ids.data = out;
    p.next_token_ids = out + 2;
    p.num_sampled = out + 3;
  }
  if constexpr (std::is_same_v<Params, PrepareInputsParams>) p.query_start_loc_out = out;
  if constexpr (std::is_same_v<Params, CorrectSpecStateParams>) p.slots.query_start_loc = out;
}

template <class Params>
void expect_one_stream(int32_t (*op)(const Params*, void*)) {
  Params params{};
  set_outputs(params);
  void* streams[8];
  ngram_npu_cuda_twin_streams(nullptr, 0);
  ASSERT_EQ(op(&params, &params), kOk) << ngram_npu_cuda_twin_violation();
  const int64_t count = ngram_npu_cuda_twin_streams(streams, 8);
  ASSERT_GE(count, 1);
  for (int64_t i = 0; i < count; ++i) EXPECT_EQ(streams[i], &params) << "launch " << i;
}

}  // namespace

#define NGRAM_NPU_TEST_STREAM(op, Params)                                     \
  extern "C" int32_t ngram_npu_cuda_##op(const Params* params, void* stream); \
  TEST(CudaTwinOperators, op##OnItsStream) { expect_one_stream(ngram_npu_cuda_##op); }

NGRAM_NPU_TEST_STREAM(prepare_next_token_ids, PrepareNextTokenIdsParams)
NGRAM_NPU_TEST_STREAM(prepare_inputs_padded, PrepareInputsPaddedParams)
NGRAM_NPU_TEST_STREAM(prepare_inputs, PrepareInputsParams)
NGRAM_NPU_TEST_STREAM(prepare_input_ids_, PrepareInputIdsParams)
NGRAM_NPU_TEST_STREAM(gather_sampled_tokens_, GatherSampledTokensParams)
NGRAM_NPU_TEST_STREAM(correct_num_computed_tokens_, CorrectNumComputedTokensParams)
NGRAM_NPU_TEST_STREAM(compute_slot_mapping_, ComputeSlotMappingParams)
NGRAM_NPU_TEST_STREAM(correct_spec_state_, CorrectSpecStateParams)
NGRAM_NPU_TEST_STREAM(ngram_propose, NgramProposeParams)
NGRAM_NPU_TEST_STREAM(ngram_step_, NgramStepParams)
