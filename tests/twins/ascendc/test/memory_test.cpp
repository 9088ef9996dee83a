// Global memory: bounds, copies, the scalar cache, and conflicts between blocks.
#include <chrono>
#include <mutex>
#include <thread>

#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::DataCopyExtParams;
using AscendC::GetBlockIdx;

const AscendC::DataCopyPadExtParams<int32_t> kNoPadding;

// `bytes` of global memory into UB.
std::function<void()> load(Tensor<int32_t>& memory, uint64_t offset, uint32_t bytes) {
  return [&memory, offset, bytes] {
    Scratch<int32_t> s(1024, false);
    AscendC::DataCopyPad(s.tensor, memory.global(offset), DataCopyExtParams(1, bytes, 0, 0, 0), kNoPadding);
  };
}

TEST(Memory, CopyRequiresADocumentedPosition) {
  Tensor<int32_t> memory(8);
  const auto copied = [&memory](auto buffer) {
    return [&memory, buffer]() mutable {
      TPipe pipe;
      pipe.InitBuffer(buffer, 32);
      copy(buffer.template Get<int32_t>(), memory.global(), 8);
      sync_pipes<HardEvent::MTE2_MTE3>();
      copy(memory.global(), buffer.template Get<int32_t>(), 8);
    };
  };
  EXPECT_CLEAN(copied(TBuf<TPosition::VECIN>()), {memory.region()});
  EXPECT_CLEAN(copied(TBuf<TPosition::VECOUT>()), {memory.region()});
  EXPECT_FAULT("a TBuf at VECCALC", copied(TBuf<TPosition::VECCALC>()), {memory.region()});
}

TEST(Memory, Bounds) {
  Tensor<int32_t> memory(100);
  EXPECT_CLEAN(load(memory, 0, 400), {memory.region()});
  EXPECT_FAULT("leaves its rows", load(memory, 0, 404), {memory.region()});
  EXPECT_FAULT("leaves its rows", load(memory, 1, 400), {memory.region()});
  EXPECT_FAULT("leaves its rows", load(memory, static_cast<uint64_t>(-1), 8), {memory.region()});
  EXPECT_FAULT("outside every tensor", load(memory, 0, 400), {});
  const auto store = on<int32_t>([&](auto& s) { copy(memory.global(), s.tensor, 64); });
  EXPECT_CLEAN(store, {memory.region()});
  EXPECT_FAULT("may only read", store, {memory.region(false)});
}

// A tensor with rows that are slices: the bytes between them do not belong to the launch.
TEST(Memory, Rows) {
  Tensor<int32_t> memory(3 * 16);
  Region rows = memory.region();
  rows.rows = 3;
  rows.row_bytes = 40;
  rows.pitch = 64;
  EXPECT_CLEAN(load(memory, 16, 40), {rows});
  EXPECT_FAULT("leaves its rows", load(memory, 16, 44), {rows});
  EXPECT_FAULT("leaves its rows", load(memory, 15, 8), {rows});
  EXPECT_FAULT("outside every tensor", load(memory, 42, 8), {rows});
}

TEST(Copies, LengthAndAlignmentAreChecked) {
  Tensor<int32_t> memory(64, 9);
  const std::vector<Region> regions = {memory.region()};
  const auto copied = [&](DataCopyExtParams params, uint32_t read, uint32_t to = 0) {
    return [=, &memory] {
      Scratch<int32_t> s(64, false);
      AscendC::DataCopyPad(s.tensor[to], memory.global(), params, kNoPadding);
      EXPECT_EQ(value_of(s.tensor, read), 9);
    };
  };
  EXPECT_CLEAN(copied({1, 20, 0, 0, 0}, 4), regions);
  EXPECT_FAULT("nothing has computed", copied({1, 20, 0, 0, 0}, 5), regions);  // the filling up to 32 bytes
  EXPECT_FAULT("the limit is 2097151", copied({1, 0, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("the limit is 2097151", copied({1, 2097152, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("no multiple of the element", copied({1, 6, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("single blocks", copied({2, 4, 0, 0, 0}, 0), regions);
  EXPECT_FAULT("single blocks", copied({1, 4, 4, 0, 0}, 0), regions);
  EXPECT_FAULT("not aligned to 32", copied({1, 4, 0, 0, 0}, 0, 1), regions);
}

// Even within one block, nothing orders a store by MTE3 before a later load by MTE2 or S, nor a load before a later
// store.
TEST(Memory, BlockMustOrderItsOwnAccesses) {
  Tensor<int32_t> memory(64);
  const auto kernel = [&](const std::function<void()>& between, bool by_scalar) {
    return [&memory, between, by_scalar] {
      Scratch<int32_t> s(64);
      LocalTensor<int32_t> other = s.allocate<int32_t>(64);
      copy(memory.global(), s.tensor, 64);
      between();
      if (by_scalar) {
        EXPECT_EQ(memory.pointer()[3], 1);
      } else {
        copy(other, memory.global(), 64);
      }
    };
  };
  EXPECT_FAULT("nothing orders them", kernel([] {}, false), {memory.region()});
  EXPECT_CLEAN(kernel(sync_pipes<HardEvent::MTE3_MTE2>, false), {memory.region()});
  EXPECT_FAULT("nothing orders them", kernel([] {}, true), {memory.region()});
  EXPECT_CLEAN(kernel(sync_pipes<HardEvent::MTE3_S>, true), {memory.region()});
  EXPECT_FAULT("nothing orders them", on<int32_t>([&](auto& s) {
                 copy(s.template allocate<int32_t>(64), memory.global(), 64);
                 copy(memory.global(), s.tensor, 64);
               }),
               {memory.region()});
  const auto stored_after_load = [&](const std::function<void()>& between) {
    return [&memory, between] {
      Scratch<int32_t> s(64);
      EXPECT_GE(memory.pointer()[3], 0);
      between();
      copy(memory.global(), s.tensor, 64);
    };
  };
  EXPECT_FAULT("pipe S still reads", stored_after_load([] {}), {memory.region()});
  EXPECT_CLEAN(stored_after_load(sync_pipes<HardEvent::S_MTE3>), {memory.region()});
}

TEST(ScalarCache, StaleCopyIsReported) {
  Tensor<int32_t> memory(64, 5);
  const auto kernel = [&](bool read_before) {
    return [&memory, read_before] {
      Scratch<int32_t> s(64);
      if (read_before) {
        EXPECT_EQ(memory.pointer()[0], 5);
      }
      sync_all_pipes();
      copy(memory.global(), s.tensor, 64);
      sync_all_pipes();
      EXPECT_EQ(memory.pointer()[0], 1);
    };
  };
  EXPECT_FAULT("an old copy", kernel(true), {memory.region()});
  EXPECT_CLEAN(kernel(false), {memory.region()});
}

TEST(ScalarCache, Pointers) {
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
  // Every block writes its own 64 elements, or some of its neighbour's too; and reads its own or its neighbour's.
  const auto kernel = [&](uint32_t written, uint64_t read) {
    return [&memory, written, read] {
      Scratch<int32_t> s(128);
      const uint64_t at = static_cast<uint64_t>(GetBlockIdx()) * 64;
      sync_all_pipes();
      copy(memory.global(at), s.tensor, written);
      sync_all_pipes();
      copy(s.tensor, memory.global((at + read) % 256), 64);
    };
  };
  EXPECT_CLEAN(kernel(64, 0), {memory.region()}, 4);
  EXPECT_FAULT("both write", kernel(72, 0), {memory.region()}, 3);
  EXPECT_FAULT("one writes what the other reads", kernel(64, 64), {memory.region()}, 4);
}

// For launches on class-B input: blocks and pipes may race, but must stay inside the tensors.
TEST(Blocks, AllowedRacesMustStayInsideTheTensors) {
  Tensor<int32_t> memory(256);
  const auto fault = [&](uint32_t written, bool allowed) {
    Options options;
    options.races_allowed = allowed;
    const auto kernel = [&] {
      Scratch<int32_t> s(512);
      const GlobalTensor<int32_t> global = memory.global();
      sync_all_pipes();
      const int32_t before = memory.pointer()[0];
      copy(global, s.tensor, written);
      copy(s.allocate<int32_t>(64, false), global, 64);
      EXPECT_LE(before, memory.pointer()[0] + 1);
    };
    return run({memory.region()}, 4, kernel, options).fault;
  };
  EXPECT_NE(fault(64, false), "");
  EXPECT_EQ(fault(64, true), "");
  EXPECT_NE(fault(264, true).find("leaves its rows"), std::string::npos);
}

TEST(Blocks, RunShuffledOnThreads) {
  std::mutex mutex;
  std::vector<int64_t> order;
  std::vector<std::thread::id> threads;
  const auto kernel = [&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::lock_guard<std::mutex> lock(mutex);
    order.push_back(GetBlockIdx());
    threads.push_back(std::this_thread::get_id());
  };
  EXPECT_CLEAN(kernel, {}, 16);
  EXPECT_FALSE(std::is_sorted(order.begin(), order.end()));
  EXPECT_NE(std::count(threads.begin(), threads.end(), threads[0]), 16);
  std::sort(order.begin(), order.end());
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

}  // namespace
}  // namespace ngram_npu::twin
