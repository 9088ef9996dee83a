// Global memory: bounds, copies, the scalar cache, and conflicts between blocks.
#include <chrono>
#include <mutex>
#include <thread>

#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::DataCopy;
using AscendC::DataCopyExtParams;
using AscendC::DataCopyPad;
using AscendC::DataCopyPadExtParams;
using AscendC::DataCopyParams;
using AscendC::GetBlockIdx;
using AscendC::PipeBarrier;

using Clean = void (*)(const GlobalTensor<int32_t>&);
constexpr Clean clean_line =
    AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::SINGLE_CACHE_LINE, AscendC::DcciDst::CACHELINE_OUT>;
constexpr Clean clean_all =
    AscendC::DataCacheCleanAndInvalid<int32_t, AscendC::CacheLine::ENTIRE_DATA_CACHE, AscendC::DcciDst::CACHELINE_OUT>;

// `bytes` of global memory into UB.
std::function<void()> load(Tensor<int32_t>& memory, uint64_t offset, uint32_t bytes) {
  return [&memory, offset, bytes] {
    Scratch<int32_t> s(1024, false);
    DataCopyPad(s.tensor, memory.global()[offset], DataCopyExtParams(1, bytes, 0, 0, 0),
                DataCopyPadExtParams<int32_t>());
  };
}

TEST(Memory, PositionsThatAreCopied) {
  Tensor<int32_t> memory(8);
  const auto copied = [&memory](auto buffer) {
    return [&memory, buffer]() mutable {
      TPipe pipe;
      pipe.InitBuffer(buffer, 32);
      const DataCopyExtParams params(1, 32, 0, 0, 0);
      DataCopyPad(buffer.template Get<int32_t>(8), memory.global(), params, DataCopyPadExtParams<int32_t>());
      AscendC::SetFlag<HardEvent::MTE2_MTE3>(0);
      AscendC::WaitFlag<HardEvent::MTE2_MTE3>(0);
      DataCopyPad(memory.global(), buffer.template Get<int32_t>(8), params);
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
  // DataCopy copies the count it was given, even beyond the tensor's end.
  const auto whole = [&] {
    Scratch<int32_t> s(1024, false);
    DataCopy(s.tensor, memory.global(), 104);
  };
  EXPECT_FAULT("leaves its rows", whole, {memory.region()});
  EXPECT_FAULT("outside every tensor", [&] { memory.global().GetValue(100); }, {memory.region()});
}

TEST(Memory, ReadOnly) {
  Tensor<int32_t> memory(64);
  const auto kernel = [&] {
    Scratch<int32_t> s(64);
    PipeBarrier<PIPE_ALL>();
    DataCopy(memory.global(), s.tensor, 64);
  };
  EXPECT_CLEAN(kernel, {memory.region()});
  EXPECT_FAULT("may only read", kernel, {memory.region(false)});
}

// A tensor whose rows are slices: the bytes between them do not belong to the launch.
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
  const auto blocks = [&](uint32_t bytes) {
    return [&memory, bytes] {
      Scratch<int32_t> s(1024, false);
      DataCopyPad(s.tensor, memory.global(), DataCopyExtParams(3, bytes, 64 - bytes, 0, 0),
                  DataCopyPadExtParams<int32_t>());
    };
  };
  EXPECT_CLEAN(blocks(40), {rows});
  EXPECT_FAULT("leaves its rows", blocks(44), {rows});
}

TEST(Copies, Lengths) {
  Tensor<int32_t> memory(4096);
  const std::vector<Region> regions = {memory.region()};
  const auto copy = [&](uint32_t count) {
    return [&memory, count] {
      Scratch<int32_t> s(1024, false);
      DataCopy(s.tensor, memory.global(), count);
    };
  };
  EXPECT_CLEAN(copy(8), regions);
  EXPECT_FAULT("no multiple of 32", copy(7), regions);
  EXPECT_FAULT("no multiple of 32", copy(0), regions);
  const auto blocks = [&](uint16_t count, uint16_t length) {
    return [&memory, count, length] {
      Scratch<int32_t> s(1024, false);
      DataCopy(s.tensor, memory.global(), DataCopyParams(count, length, 0, 0));
    };
  };
  EXPECT_CLEAN(blocks(4, 2), regions);
  EXPECT_FAULT("limit 4095", blocks(4096, 1), regions);
  EXPECT_FAULT("blockLen 0", blocks(1, 0), regions);
}

TEST(Copies, Padded) {
  Tensor<int32_t> memory(8192, 9);
  const std::vector<Region> regions = {memory.region()};
  const auto copy = [&](DataCopyExtParams params, DataCopyPadExtParams<int32_t> pad,
                        const std::function<void(LocalTensor<int32_t>)>& then) {
    return [=, &memory] {
      Scratch<int32_t> s(8192, false);
      DataCopyPad(s.tensor, memory.global(), params, pad);
      then(s.tensor);
    };
  };
  const auto nothing = [](LocalTensor<int32_t>) {};
  const DataCopyPadExtParams<int32_t> none;
  const auto reads = [](uint32_t at, int32_t expected) {
    return [at, expected](LocalTensor<int32_t> t) { EXPECT_EQ(t.GetValue(at), expected); };
  };
  EXPECT_CLEAN(copy({1, 20, 0, 0, 0}, none, reads(4, 9)), regions);
  // The filling up to 32 bytes is poison, except for as much padding as was asked for.
  EXPECT_FAULT("nothing has computed", copy({1, 20, 0, 0, 0}, none, reads(5, 0)), regions);
  EXPECT_CLEAN(copy({1, 20, 0, 0, 0}, {true, 0, 2, -1}, reads(6, -1)), regions);
  EXPECT_FAULT("nothing has computed", copy({1, 20, 0, 0, 0}, {true, 0, 2, -1}, reads(7, -1)), regions);
  EXPECT_CLEAN(copy({1, 20, 0, 0, 0}, {true, 1, 2, -1}, reads(0, -1)), regions);
  EXPECT_CLEAN(copy({1, 20, 0, 0, 0}, {true, 1, 2, -1}, reads(1, 9)), regions);
  EXPECT_FAULT("padding of more than 32 bytes", copy({1, 20, 0, 0, 0}, {true, 0, 9, -1}, nothing), regions);
  // In UB each block starts at a multiple of 32 bytes, and strides are in units of 32 bytes.
  EXPECT_CLEAN(copy({2, 20, 0, 0, 0}, none, reads(8, 9)), regions);
  EXPECT_CLEAN(copy({2, 20, 0, 1, 0}, none, reads(16, 9)), regions);
  EXPECT_FAULT("limit is 4095", copy({4096, 4, 0, 0, 0}, none, nothing), regions);
  EXPECT_FAULT("blockLen 0", copy({1, 0, 0, 0, 0}, none, nothing), regions);
  EXPECT_FAULT("the limit is 2097151", copy({1, 2097152, 0, 0, 0}, none, nothing), regions);
  EXPECT_FAULT("no multiple of the element", copy({1, 6, 0, 0, 0}, none, nothing), regions);
  EXPECT_FAULT(
      "not aligned to 32",
      [&] {
        Scratch<int32_t> s(64, false);
        DataCopyPad(s.tensor[1], memory.global(), DataCopyExtParams(1, 4, 0, 0, 0), DataCopyPadExtParams<int32_t>());
      },
      regions);
}

TEST(Copies, OutStoresExactlyItsBytes) {
  Tensor<int32_t> memory(8, -1);
  EXPECT_CLEAN(
      [&] {
        Scratch<int32_t> s(64);
        PipeBarrier<PIPE_ALL>();
        DataCopyPad(memory.global()[1], s.tensor, DataCopyExtParams(1, 12, 0, 0, 0));
      },
      {memory.region()});
  EXPECT_EQ(memory.values, (std::vector<int32_t>{-1, 1, 1, 1, -1, -1, -1, -1}));
}

// Even within one block, nothing orders a store by MTE3 before a later load by MTE2 or S.
TEST(Memory, OrderWithinABlock) {
  Tensor<int32_t> memory(64);
  const auto kernel = [&](const std::function<void()>& between, bool by_scalar) {
    return [&memory, between, by_scalar] {
      Scratch<int32_t> s(64);
      LocalTensor<int32_t> other = s.more<int32_t>(64);
      PipeBarrier<PIPE_ALL>();
      DataCopy(memory.global(), s.tensor, 64);
      between();
      if (by_scalar) {
        memory.global().GetValue(3);
      } else {
        DataCopy(other, memory.global(), 64);
      }
    };
  };
  const auto order = [](auto event) {
    return [event] {
      AscendC::SetFlag<decltype(event)::value>(0);
      AscendC::WaitFlag<decltype(event)::value>(0);
    };
  };
  const auto mte3_mte2 = order(std::integral_constant<HardEvent, HardEvent::MTE3_MTE2>());
  const auto mte3_s = order(std::integral_constant<HardEvent, HardEvent::MTE3_S>());
  EXPECT_FAULT("nothing orders them", kernel([] {}, false), {memory.region()});
  EXPECT_CLEAN(kernel(mte3_mte2, false), {memory.region()});
  EXPECT_FAULT("nothing orders them", kernel([] {}, true), {memory.region()});
  EXPECT_CLEAN(kernel(mte3_s, true), {memory.region()});
  EXPECT_FAULT("nothing orders them",
               [&] {
                 Scratch<int32_t> s(64);
                 LocalTensor<int32_t> other = s.more<int32_t>(64);
                 PipeBarrier<PIPE_ALL>();
                 DataCopy(other, memory.global(), 64);
                 DataCopy(memory.global(), s.tensor, 64);
               },
               {memory.region()});
}

TEST(ScalarCache, StoresStayUntilCleaned) {
  Tensor<int32_t> memory(64);
  const auto kernel = [&](Clean clean) {
    return [&memory, clean] {
      GlobalTensor<int32_t> global = memory.global();
      global.SetValue(3, 7);
      if (clean != nullptr) clean(global[3]);
    };
  };
  EXPECT_FAULT("not cleaned", kernel(nullptr), {memory.region()});
  EXPECT_EQ(memory.values[3], 0);
  EXPECT_CLEAN(kernel(clean_line), {memory.region()});
  EXPECT_EQ(memory.values[3], 7);
  EXPECT_CLEAN(kernel(clean_all), {memory.region()});
  EXPECT_FAULT("has not cleaned",
               [&] {
                 Scratch<int32_t> s(64, false);
                 memory.global().SetValue(3, 8);
                 DataCopy(s.tensor, memory.global(), 64);
               },
               {memory.region()});
}

TEST(ScalarCache, HoldsOldCopies) {
  Tensor<int32_t> memory(64, 5);
  const auto kernel = [&](Clean clean) {
    return [&memory, clean] {
      Scratch<int32_t> s(64);
      const GlobalTensor<int32_t> global = memory.global();
      EXPECT_EQ(global.GetValue(0), 5);
      PipeBarrier<PIPE_ALL>();
      DataCopy(global, s.tensor, 64);
      PipeBarrier<PIPE_ALL>();
      if (clean != nullptr) clean(global);
      EXPECT_EQ(global.GetValue(0), 1);
    };
  };
  EXPECT_FAULT("an old copy", kernel(nullptr), {memory.region()});
  memory.values.assign(64, 5);
  EXPECT_CLEAN(kernel(clean_line), {memory.region()});
}

// The twin treats scalar accesses through a pointer like those of GlobalTensor.
TEST(ScalarCache, Pointers) {
  Tensor<int32_t> memory(64, 5);
  const GmPointer<int32_t> pointer(memory.values.data());
  EXPECT_CLEAN(
      [&] {
        const GmPointer<const int32_t> constant = pointer;
        EXPECT_EQ(constant[63], 5);
        EXPECT_EQ(*(pointer + 1) + 1, 6);
      },
      {memory.region()});
  EXPECT_FAULT("outside every tensor", [&] { EXPECT_EQ(pointer[64] + 0, 5); }, {memory.region()});
  EXPECT_FAULT("not cleaned", [&] { pointer[0] = 1; }, {memory.region()});
}

// Two blocks store neighbouring scalars in one 64-byte line, of which each has its own copy.
TEST(ScalarCache, LinesClobber) {
  Tensor<int32_t> memory(256);
  const auto kernel = [&](uint64_t apart) {
    return [&memory, apart] {
      GlobalTensor<int32_t> global = memory.global();
      const uint64_t skew =
          (kScalarLine - reinterpret_cast<uintptr_t>(memory.values.data()) % kScalarLine) / sizeof(int32_t);
      const uint64_t at = skew + static_cast<uint64_t>(GetBlockIdx()) * apart;
      global.SetValue(at, 7);
      clean_line(global[at]);
    };
  };
  EXPECT_FAULT("cleans a 64-byte line", kernel(1), {memory.region()}, 2);
  EXPECT_FAULT("cleans a 64-byte line", kernel(15), {memory.region()}, 2);
  EXPECT_CLEAN(kernel(16), {memory.region()}, 2);
}

TEST(Blocks, Races) {
  Tensor<int32_t> memory(256);
  // Every block writes its own 64 elements, or some of its neighbour's too; and reads its own or its neighbour's.
  const auto kernel = [&](uint32_t written, uint64_t read) {
    return [&memory, written, read] {
      Scratch<int32_t> s(128);
      const uint64_t at = static_cast<uint64_t>(GetBlockIdx()) * 64;
      PipeBarrier<PIPE_ALL>();
      DataCopy(memory.global()[at], s.tensor, written);
      PipeBarrier<PIPE_ALL>();
      DataCopy(s.tensor, memory.global()[(at + read) % 256], 64);
    };
  };
  EXPECT_CLEAN(kernel(64, 0), {memory.region()}, 4);
  EXPECT_FAULT("both write", kernel(72, 0), {memory.region()}, 3);
  EXPECT_FAULT("one writes what the other reads", kernel(64, 64), {memory.region()}, 4);
}

// For launches on class-B input: blocks and pipes may race, but must stay inside the tensors.
TEST(Blocks, RacesAllowed) {
  Tensor<int32_t> memory(256);
  const auto fault = [&](uint32_t written, bool allowed) {
    Options options;
    options.races_allowed = allowed;
    const auto kernel = [&] {
      Scratch<int32_t> s(512);
      const GlobalTensor<int32_t> global = memory.global();
      PipeBarrier<PIPE_ALL>();
      global.GetValue(0);
      DataCopy(global, s.tensor, written);
      DataCopy(s.more<int32_t>(64, false), global, 64);
      global.GetValue(0);
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
    EXPECT_EQ(AscendC::GetBlockNum(), 16);
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
