// Kernels that access memory wrongly, and correct ones.
#include "launching.h"
#include "watched_kernels.h"

namespace twin {
namespace {

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

TEST_F(CudaTwinWatch, BarrierOrdersBlock) {
  expect_right({3, 64}, neighbour, ints(), staging_.data(), Order::kBarrier);
  expect_right({3, 64}, neighbour_in_shared_memory, ints(), Order::kBarrier);
  expect_right({1, 64}, overwrites_what_others_read, ints(), staging_.data(), Order::kBarrier);
}

TEST_F(CudaTwinWatch, SyncwarpOrdersOnlyWarp) {
  expect_right({3, 32}, neighbour, ints(), staging_.data(), Order::kSyncwarp);
  expect_right({3, 32}, neighbour_in_shared_memory, ints(), Order::kSyncwarp);
  expect_right({1, 32}, overwrites_what_others_read, ints(), staging_.data(), Order::kSyncwarp);
  expect_caught("race: ", {3, 64}, neighbour, ints(), staging_.data(), Order::kSyncwarp);
  expect_caught("race: ", {3, 64}, overwrites_what_others_read, ints(), staging_.data(), Order::kSyncwarp);
}

TEST_F(CudaTwinWatch, UnorderedAccessIsRace) {
  expect_caught("global memory", {1, 32}, neighbour, ints(), staging_.data(), Order::kNone);
  // A read before any write, or after one but unordered.
  expect_caught("shared memory", {1, 32}, neighbour_in_shared_memory, ints(), Order::kNone);
  expect_caught("race: ", {1, 32}, overwrites_what_others_read, ints(), staging_.data(), Order::kNone);
  expect_caught("race: ", {1, 32}, shuffle_is_no_barrier, ints());
  expect_caught("race: ", {1, 32}, same_word_twice, ints());
  expect_caught("race: ", {32, 1}, same_word_twice, ints());
}

TEST_F(CudaTwinWatch, DifferentBytesAreNoRace) {
  expect_right({1, 64}, bytes_of_one_word, reinterpret_cast<uint8_t*>(ints()));
}

TEST_F(CudaTwinWatch, LastBlockNeedsBarrierAndFences) {
  const auto with = [this](const LastBlock& parts) {
    return [this, parts](auto expect) { expect(last_block_reads, staging_.data(), &counter_, ints(), parts); };
  };
  const auto right = [](auto... a) { expect_right({5, 64}, a...); };
  const auto wrong = [this](auto... a) {
    for (int i = 0; i < 20; ++i) {
      counter_ = 0;
      ASSERT_EQ(run({5, 64}, a...), cudaErrorLaunchFailure);
    }
  };
  with({})(right);
  EXPECT_EQ(ints_[0], 5);
  with({false, true, true, true})(wrong);
  with({true, false, true, true})(wrong);
  with({true, true, false, true})(wrong);
  with({true, true, true, false})(right);  // only thread 0 continues
}

TEST_F(CudaTwinWatch, AcquireReleaseAtomicReplacesFences) {
  const auto with = [this](auto expect, int order, int scope) {
    counter_ = 0;
    expect(last_block_acquires, staging_.data(), &counter_, ints(), order, scope);
  };
  const auto right = [](auto... a) { expect_right({5, 64}, a...); };
  const auto wrong = [](auto... a) { ASSERT_EQ(run({5, 64}, a...), cudaErrorLaunchFailure); };
  with(right, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
  with(wrong, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_BLOCK);
  for (const int order : {__NV_ATOMIC_ACQUIRE, __NV_ATOMIC_RELEASE, __NV_ATOMIC_RELAXED}) {
    with(wrong, order, __NV_THREAD_SCOPE_DEVICE);
  }
}

TEST_F(CudaTwinWatch, WriteToConstantMemoryIsReported) {
  expect_right({2, 1}, constant_and_written, ints(), 3, 4, &staging_[0]);
  expect_caught("constant", {2, 1}, constant_and_written, ints(), 3, 3, &staging_[0]);
}

TEST_F(CudaTwinWatch, VolatileReadsMayDiffer) {
  unsigned differed = 0;
  for (int i = 0; i < 200; ++i) ASSERT_EQ(run({2, 1}, volatile_read_twice, &counter_, &differed), cudaSuccess);
  EXPECT_GT(differed, 0u);
}

TEST_F(CudaTwinWatch, PlainAccessToAtomicIsRace) {
  expect_caught("race: ", {1, 32}, atomic_and_plain, reinterpret_cast<unsigned*>(ints()));
  expect_right({1, 32}, atomic_and_volatile, reinterpret_cast<unsigned*>(ints()), &counter_);
}

TEST_F(CudaTwinWatch, AllowedRaceIsNotReported) {
  ngram_npu_cuda_twin_allow_races(1);
  expect_right({32, 1}, same_word_twice, ints());
}

TEST_F(CudaTwinWatch, PlainReadsMayDiffer) {
  ngram_npu_cuda_twin_allow_races(1);
  int differed = 0;
  expect_wrong_in_some_order([&] {
    differed = 0;
    std::fill_n(ints(), 32, 0);
    return run({2, 1}, plain_reads, ints(), &differed) == cudaSuccess && differed != 0;
  });
}

TEST_F(CudaTwinWatch, UnwrittenSharedMemoryIsReported) {
  expect_caught("at offset", {1, 64}, reads_unwritten_shared_memory, ints());
}

// Rows of three elements in a buffer with rows of five, starting at element one.
TEST_F(CudaTwinWatch, AccessOutsideTensorsIsReported) {
  int buffer[15] = {};
  int out = 0;
  const int64_t item = sizeof(int);
  const auto give = [&](int writable) {
    ngram_npu_cuda_twin_forget_tensors();
    ngram_npu_cuda_twin_tensor(buffer, 15 * item, buffer + 1, 2, 3 * item, 5 * item, writable);
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
