// Tests what the model checks in global memory: bounds, copies, the scalar cache, and conflicts between blocks.
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::DataCopyExtParams;
using AscendC::GetBlockIdx;

const AscendC::DataCopyPadExtParams<int32_t> kNoPadding;

// Returns a kernel that copies `bytes` of global memory, from element `offset`, to UB.
std::function<void()> make_load_kernel(Tensor<int32_t>& memory, uint64_t offset, uint32_t bytes) {
  return [&memory, offset, bytes] {
    Scratch<int32_t> s(1024, false);
    AscendC::DataCopyPad(s.tensor, memory.global(offset), DataCopyExtParams(1, bytes, 0, 0, 0), kNoPadding);
  };
}

TEST(Memory, CopyRequiresDocumentedPosition) {
  Tensor<int32_t> memory(8);
  const auto make_kernel = [&memory](auto buffer) {
    return [&memory, buffer]() mutable {
      TPipe pipe;
      pipe.InitBuffer(buffer, 32);
      copy(buffer.template Get<int32_t>(), memory.global(), 8);
      sync_pipes<HardEvent::MTE2_MTE3>();
      copy(memory.global(), buffer.template Get<int32_t>(), 8);
    };
  };
  EXPECT_CLEAN(make_kernel(TBuf<TPosition::VECIN>()), {memory.region()});
  EXPECT_CLEAN(make_kernel(TBuf<TPosition::VECOUT>()), {memory.region()});
  EXPECT_FAULT("got a TBuf at VECCALC", make_kernel(TBuf<TPosition::VECCALC>()), {memory.region()});
}

TEST(Memory, CopyOutsideTensorIsReported) {
  Tensor<int32_t> memory(100);
  EXPECT_CLEAN(make_load_kernel(memory, 0, 400), {memory.region()});
  EXPECT_FAULT("leaves its rows", make_load_kernel(memory, 0, 404), {memory.region()});
  EXPECT_FAULT("leaves its rows", make_load_kernel(memory, 1, 400), {memory.region()});
  EXPECT_FAULT("leaves its rows", make_load_kernel(memory, static_cast<uint64_t>(-1), 8), {memory.region()});
  EXPECT_FAULT("outside every tensor", make_load_kernel(memory, 0, 400), {});
  const auto store_kernel = make_scratch_kernel<int32_t>([&](auto& s) { copy(memory.global(), s.tensor, 64); });
  EXPECT_CLEAN(store_kernel, {memory.region()});
  EXPECT_FAULT("may only read", store_kernel, {memory.region(false)});
}

// The bytes between rows that are slices do not belong to the launch.
TEST(Memory, CopyOfBytesBetweenRowsIsReported) {
  Tensor<int32_t> memory(3 * 16);
  Region rows = memory.region();
  rows.rows = 3;
  rows.row_bytes = 40;
  rows.pitch = 64;
  EXPECT_CLEAN(make_load_kernel(memory, 16, 40), {rows});
  EXPECT_FAULT("leaves its rows", make_load_kernel(memory, 16, 44), {rows});
  EXPECT_FAULT("leaves its rows", make_load_kernel(memory, 15, 8), {rows});
  EXPECT_FAULT("outside every tensor", make_load_kernel(memory, 42, 8), {rows});
}

TEST(Copies, InvalidLengthOrAlignmentIsReported) {
  Tensor<int32_t> memory(64, 9);
  const std::vector<Region> regions = {memory.region()};
  // Copies to element `first_written` of UB, and reads element `read`.
  const auto make_kernel = [&](DataCopyExtParams params, uint32_t read, uint32_t first_written = 0) {
    return [=, &memory] {
      Scratch<int32_t> s(64, false);
      AscendC::DataCopyPad(s.tensor[first_written], memory.global(), params, kNoPadding);
      EXPECT_EQ(read_element(s.tensor, read), 9);
    };
  };
  EXPECT_CLEAN(make_kernel({1, 20, 0, 0, 0}, 4), regions);
  EXPECT_FAULT("uninitialized UB", make_kernel({1, 20, 0, 0, 0}, 5),
               regions);  // the bytes after the data, up to 32, are poison
  EXPECT_FAULT("the limit is 2097151", make_kernel({1, 0, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("the limit is 2097151", make_kernel({1, 2097152, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("no multiple of the element", make_kernel({1, 6, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("single blocks", make_kernel({2, 4, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("single blocks", make_kernel({1, 4, 4, 0, 0}, 0), regions);
  EXPECT_FAULT("not aligned to 32", make_kernel({1, 4, 0, 0, 0}, 0, 1), regions);
}

// Even within one block, only flags order a store by MTE3 and a later load by MTE2 or S, or a load and a later store.
TEST(Memory, UnorderedAccessesOfOneBlockAreReported) {
  Tensor<int32_t> memory(64);
  const auto make_store_load_kernel = [&](const std::function<void()>& synchronize, bool loads_scalar) {
    return [&memory, synchronize, loads_scalar] {
      Scratch<int32_t> s(64);
      LocalTensor<int32_t> other = s.allocate<int32_t>(64);
      copy(memory.global(), s.tensor, 64);
      synchronize();
      if (loads_scalar) {
        EXPECT_EQ(memory.pointer()[3], 1);
      } else {
        copy(other, memory.global(), 64);
      }
    };
  };
  EXPECT_FAULT("nothing orders the accesses", make_store_load_kernel([] {}, false), {memory.region()});
  EXPECT_CLEAN(make_store_load_kernel(sync_pipes<HardEvent::MTE3_MTE2>, false), {memory.region()});
  EXPECT_FAULT("nothing orders the accesses", make_store_load_kernel([] {}, true), {memory.region()});
  EXPECT_CLEAN(make_store_load_kernel(sync_pipes<HardEvent::MTE3_S>, true), {memory.region()});
  EXPECT_FAULT("nothing orders the accesses", make_scratch_kernel<int32_t>([&](auto& s) {
                 copy(s.template allocate<int32_t>(64), memory.global(), 64);
                 copy(memory.global(), s.tensor, 64);
               }),
               {memory.region()});
  const auto make_load_store_kernel = [&](const std::function<void()>& synchronize) {
    return [&memory, synchronize] {
      Scratch<int32_t> s(64);
      EXPECT_GE(memory.pointer()[3], 0);
      synchronize();
      copy(memory.global(), s.tensor, 64);
    };
  };
  EXPECT_FAULT("pipe S still reads", make_load_store_kernel([] {}), {memory.region()});
  EXPECT_CLEAN(make_load_store_kernel(sync_pipes<HardEvent::S_MTE3>), {memory.region()});
}

TEST(ScalarCache, StaleCopyIsReported) {
  Tensor<int32_t> memory(64, 5);
  const auto make_kernel = [&](bool loads_before_store) {
    return [&memory, loads_before_store] {
      Scratch<int32_t> s(64);
      if (loads_before_store) {
        EXPECT_EQ(memory.pointer()[0], 5);
      }
      sync_all_pipes();
      copy(memory.global(), s.tensor, 64);
      sync_all_pipes();
      EXPECT_EQ(memory.pointer()[0], 1);
    };
  };
  EXPECT_FAULT("an old copy", make_kernel(true), {memory.region()});
  EXPECT_CLEAN(make_kernel(false), {memory.region()});
}

TEST(ScalarCache, PointerLoadsElementsAndReportsStores) {
  Tensor<int32_t> memory(64, 5);
  const GmPointer<int32_t> pointer = memory.pointer();
  EXPECT_CLEAN(
      [&] {
        const GmPointer<const int32_t> constant = pointer;
        EXPECT_EQ(constant[63], 5);
        EXPECT_EQ(*(pointer + 1) + 1, 6);
      },
      {memory.region()});
  EXPECT_FAULT("outside every tensor", [&] { EXPECT_EQ(pointer[64] + 0, 5); }, {memory.region()});
  EXPECT_FAULT("a scalar store", [&] { pointer[0] = 1; }, {memory.region()});
}

TEST(Blocks, RacesAreReported) {
  Tensor<int32_t> memory(256);
  // Each block owns 64 elements. It writes `num_written` elements from the first one that it owns, and reads 64
  // elements that begin `read_offset` after the first one.
  const auto make_kernel = [&](uint32_t num_written, uint64_t read_offset) {
    return [&memory, num_written, read_offset] {
      Scratch<int32_t> s(128);
      const uint64_t first = static_cast<uint64_t>(GetBlockIdx()) * 64;
      sync_all_pipes();
      copy(memory.global(first), s.tensor, num_written);
      sync_all_pipes();
      copy(s.tensor, memory.global((first + read_offset) % 256), 64);
    };
  };
  EXPECT_CLEAN(make_kernel(64, 0), {memory.region()}, 4);
  EXPECT_FAULT("both write", make_kernel(72, 0), {memory.region()}, 3);
  EXPECT_FAULT("one writes what the other reads", make_kernel(64, 64), {memory.region()}, 4);
}

// Returns a kernel in which each block stores the maximum of `values` and 3 + its number at element `first`.
std::function<void()> make_maximum_kernel(Tensor<int32_t>& memory, uint64_t first, const std::function<void()>& then) {
  return [&memory, first, then] {
    TPipe pipe;
    TBuf<TPosition::VECOUT> buffer;
    pipe.InitBuffer(buffer, 32);
    buffer.Get<int32_t>().SetValue(0, 3 + GetBlockIdx());
    sync_pipes<HardEvent::S_MTE3>();
    AscendC::SetAtomicMax<int32_t>();
    copy(memory.global(first), buffer.Get<int32_t>(), 1);
    AscendC::SetAtomicNone();
    then();
  };
}

TEST(Atomics, MaximumOfAllBlocksIsStored) {
  Tensor<int32_t> memory(8, 5);
  EXPECT_CLEAN(make_maximum_kernel(memory, 1, [] {}), {memory.region()}, 7);
  EXPECT_EQ(memory.values, (std::vector<int32_t>{5, 9, 5, 5, 5, 5, 5, 5}));
}

TEST(Atomics, CopyAfterSetAtomicNoneOverwrites) {
  Tensor<int32_t> memory(8, 5);
  EXPECT_CLEAN(make_scratch_kernel<int32_t>([&](auto& s) {
                 AscendC::SetAtomicMax<int32_t>();
                 AscendC::SetAtomicNone();
                 copy(memory.global(), s.tensor, 1);
               }),
               {memory.region()});
  EXPECT_EQ(memory.values[0], 1);
}

TEST(Atomics, WrongModeOrPositionIsReported) {
  Tensor<int32_t> memory(8, 5);
  EXPECT_FAULT("SetAtomicMax without SetAtomicNone", AscendC::SetAtomicMax<int32_t>);
  EXPECT_FAULT("must come from a TBuf at VECOUT", make_scratch_kernel<int32_t>([&](auto& s) {
                 AscendC::SetAtomicMax<int32_t>();
                 copy(memory.global(), s.tensor, 1);
               }),
               {memory.region()});
  EXPECT_FAULT("another element type",
               make_maximum_kernel(memory, 0,
                                   [&] {
                                     TBuf<TPosition::VECOUT> other;
                                     AscendC::TPipe::current()->InitBuffer(other, 32);
                                     other.Get<int32_t>().SetValue(0, 1);
                                     sync_pipes<HardEvent::S_MTE3>();
                                     AscendC::SetAtomicMax<int16_t>();
                                     copy(memory.global(), other.Get<int32_t>(), 1);
                                   }),
               {memory.region()});
}

// The other blocks' maxima may come later, so only another launch may read the result.
TEST(Atomics, ReadOrPlainWriteInSameLaunchIsReported) {
  Tensor<int32_t> memory(64, 5);
  const auto make_kernel = [&](uint64_t first, bool stores) {
    return make_maximum_kernel(memory, 8, [&memory, first, stores] {
      TBuf<TPosition::VECIN> buffer;
      AscendC::TPipe::current()->InitBuffer(buffer, 32);
      const LocalTensor<int32_t> other = buffer.Get<int32_t>();
      AscendC::Duplicate(other, 1, 8);
      sync_all_pipes();
      if (stores) {
        copy(memory.global(first), other, 1);
      } else {
        copy(other, memory.global(first), 1);
      }
      sync_all_pipes();
    });
  };
  EXPECT_CLEAN(make_kernel(9, false), {memory.region()}, 3);
  EXPECT_FAULT("one reads what the other changes atomically", make_kernel(8, false), {memory.region()}, 1);
  EXPECT_FAULT("one reads what the other changes atomically", make_kernel(8, false), {memory.region()}, 3);
  EXPECT_CLEAN(make_kernel(9, true), {memory.region()}, 1);
  EXPECT_FAULT("both write the same bytes", make_kernel(9, true), {memory.region()}, 3);
  EXPECT_FAULT("one overwrites what the other changes atomically", make_kernel(8, true), {memory.region()}, 1);
}

// In launches whose results are unspecified, blocks and pipes may race, but must not access memory outside the
// tensors.
TEST(Blocks, AllowedRaceOutsideTensorIsReported) {
  Tensor<int32_t> memory(256);
  const auto get_fault = [&](uint32_t num_written, bool allowed) {
    Options options;
    options.races_allowed = allowed;
    const auto kernel = [&] {
      Scratch<int32_t> s(512);
      const GlobalTensor<int32_t> global = memory.global();
      sync_all_pipes();
      const int32_t first_value = memory.pointer()[0];
      copy(global, s.tensor, num_written);
      copy(s.allocate<int32_t>(64, false), global, 64);
      EXPECT_LE(first_value, memory.pointer()[0] + 1);
    };
    return run({memory.region()}, 4, kernel, options).fault;
  };
  EXPECT_NE(get_fault(64, false), "");
  EXPECT_EQ(get_fault(64, true), "");
  EXPECT_NE(get_fault(264, true).find("leaves its rows"), std::string::npos);
}

TEST(Blocks, BlocksRunInShuffledOrderOnSeveralThreads) {
  std::mutex mutex;
  std::condition_variable is_joined;
  std::vector<int64_t> order;
  std::set<std::thread::id> threads;
  // A block waits until a second thread runs one, so that a busy machine does not let one thread run all.
  const auto kernel = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    order.push_back(GetBlockIdx());
    threads.insert(std::this_thread::get_id());
    is_joined.notify_all();
    is_joined.wait_for(lock, std::chrono::minutes(1), [&] { return threads.size() > 1; });
  };
  EXPECT_CLEAN(kernel, {}, 16);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  EXPECT_EQ(threads.size(), 2U);
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

}  // namespace
}  // namespace ngram_npu::twin
