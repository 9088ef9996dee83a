// UB: bounds, lives of tensors, queues, poison, alignment.
#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::Add;
using AscendC::Duplicate;

TEST(Buffers, Bounds) {
  EXPECT_CLEAN([] { Scratch<int32_t> s(64); });
  EXPECT_FAULT("of a tensor of 256 bytes", [] {
    Scratch<int32_t> s(64);
    Duplicate(s.tensor, 0, 65);
  });
  EXPECT_FAULT("of a tensor of 256 bytes", [] {
    Scratch<int32_t> s(64);
    Add(s.tensor[32], s.tensor[32], s.tensor[32], 33);
  });
  EXPECT_FAULT("GetValue(64) of 64", [] {
    Scratch<int32_t> s(64);
    s.tensor.GetValue(64);
  });
  EXPECT_FAULT("SetValue(64) of 64", [] {
    Scratch<int32_t> s(64);
    s.tensor.SetValue(64, 0);
  });
  EXPECT_FAULT("LocalTensor[65] of 64", [] {
    Scratch<int32_t> s(64);
    s.tensor[65];
  });
}

TEST(Buffers, Budget) {
  constexpr uint32_t budget = kChip.ub_bytes - kChip.ub_reserved_bytes;
  const auto kernel = [](uint32_t bytes) {
    return [bytes] {
      TPipe pipe;
      In queue;
      TBuf<TPosition::VECCALC> rest;
      pipe.InitBuffer(queue, 2, 1000);  // 1024 each
      pipe.InitBuffer(rest, bytes - 2048);
    };
  };
  EXPECT_CLEAN(kernel(budget));
  EXPECT_FAULT("leave the", kernel(budget + 1));
  EXPECT_FAULT("a length of 0", [] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    pipe.InitBuffer(buffer, 0);
  });
  EXPECT_FAULT("more than 64 buffers", [] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    for (int i = 0; i < 65; ++i) pipe.InitBuffer(buffer, 32);
  });
  EXPECT_FAULT("without InitBuffer", [] {
    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    buffer.Get<int32_t>();
  });
  EXPECT_FAULT("a second one", [] {
    TPipe one;
    TPipe two;
  });
}

void pass_through_queue(In& queue, Tensor<int32_t>& memory) {
  LocalTensor<int32_t> filling = queue.AllocTensor<int32_t>();
  copy(filling, memory.global(), 64);
  queue.EnQue(filling);
  LocalTensor<int32_t> full = queue.DeQue<int32_t>();
  Add(full, full, full, 64);
  queue.FreeTensor(full);
}

TEST(Buffers, QueueSteps) {
  Tensor<int32_t> memory(64);
  const auto with = [&](const std::function<void(In&)>& steps) {
    return [&memory, steps] {
      TPipe pipe;
      In queue;
      pipe.InitBuffer(queue, 2, 256);
      for (int i = 0; i < 5; ++i) pass_through_queue(queue, memory);
      steps(queue);
    };
  };
  const std::vector<Region> regions = {memory.region()};
  EXPECT_CLEAN(with([](In&) {}), regions);
  EXPECT_FAULT("never freed", with([](In& q) { q.AllocTensor<int32_t>(); }), regions);
}

TEST(Buffers, QueueMisuse) {
  const auto with = [&](const std::function<void(In&)>& steps) {
    return [steps] {
      TPipe pipe;
      In queue;
      pipe.InitBuffer(queue, 3, 256);
      steps(queue);
    };
  };
  EXPECT_CLEAN(with([](In& q) {
    LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
    q.FreeTensor(t);
  }));
  EXPECT_FAULT("was freed or is in the queue", with([](In& q) {  // freed twice
                 LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
                 q.FreeTensor(t);
                 q.FreeTensor(t);
               }));
  EXPECT_FAULT("was freed or is in the queue", with([](In& q) {  // used after
                 LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
                 q.FreeTensor(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("was freed or is in the queue", with([](In& q) {  // used between EnQue and DeQue
                 LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
                 q.EnQue(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("was freed or is in the queue", with([](In& q) {  // freed while queued
                 LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
                 q.EnQue(t);
                 q.FreeTensor(t);
               }));
  EXPECT_FAULT("never freed", with([](In& q) {  // left in the queue
                 LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
                 q.EnQue(t);
               }));
  EXPECT_FAULT("empty queue", with([](In& q) { q.DeQue<int32_t>(); }));
  EXPECT_FAULT("its depth of 2", with([](In& q) {
                 for (int i = 0; i < 3; ++i) {
                   LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
                   q.EnQue(t);
                 }
               }));
  EXPECT_FAULT("would hang", with([](In& q) {
                 for (int i = 0; i < 4; ++i) q.AllocTensor<int32_t>();
               }));
  EXPECT_FAULT("not this queue's", [] {
    TPipe pipe;
    In one;
    In two;
    pipe.InitBuffer(one, 1, 256);
    pipe.InitBuffer(two, 1, 256);
    LocalTensor<int32_t> t = one.AllocTensor<int32_t>();
    two.EnQue(t);
  });
  EXPECT_FAULT("without InitBuffer", [] {
    TPipe pipe;
    In queue;
    queue.AllocTensor<int32_t>();
  });
}

// Poison may be moved, but not used.
TEST(Buffers, Poison) {
  Tensor<int32_t> memory(64);
  EXPECT_FAULT("nothing has computed", [] {
    Scratch<int32_t> s(64, false);
    value_of(s.tensor, 0);
  });
  EXPECT_FAULT("nothing has computed", [] {
    Scratch<int32_t> s(64, false);
    Add(s.tensor, s.tensor, s.tensor, 64);
    value_of(s.tensor, 0);
  });
  EXPECT_CLEAN([] {
    Scratch<int32_t> s(64, false);
    Add(s.tensor, s.tensor, s.tensor, 64);
    Duplicate(s.tensor, 3, 8);
    EXPECT_EQ(value_of(s.tensor, 7), 3);
  });
  const auto store = [&](bool filled) {
    return [&memory, filled] {
      TPipe pipe;
      Out queue;
      pipe.InitBuffer(queue, 1, 256);
      LocalTensor<int32_t> t = queue.AllocTensor<int32_t>();
      Duplicate(t, 7, filled ? 64 : 56);
      queue.EnQue(t);
      t = queue.DeQue<int32_t>();
      copy(memory.global(), t, 64);
      queue.FreeTensor(t);
    };
  };
  EXPECT_CLEAN(store(true), {memory.region()});
  EXPECT_EQ(memory.values[63], 7);
  EXPECT_FAULT("nothing has computed", store(false), {memory.region()});
  // A queue's buffer is poison when it is allocated again.
  EXPECT_FAULT("nothing has computed", [] {
    TPipe pipe;
    In queue;
    pipe.InitBuffer(queue, 1, 256);
    LocalTensor<int32_t> t = queue.AllocTensor<int32_t>();
    Duplicate(t, 7, 64);
    queue.FreeTensor(t);
    t = queue.AllocTensor<int32_t>();
    value_of(t, 0);
  });
}

// Bits that a mask clears are known, even if the operand was poison.
TEST(Buffers, PoisonByBit) {
  const auto kernel = [](uint16_t mask, bool use_or) {
    return [mask, use_or] {
      Scratch<uint16_t> s(16, false);
      LocalTensor<uint16_t> masks = s.more<uint16_t>(16);
      Duplicate(masks, mask, 16);
      if (use_or) {
        AscendC::Or(s.tensor, s.tensor, masks, 16);
      } else {
        AscendC::And(s.tensor, s.tensor, masks, 16);
      }
      EXPECT_EQ(value_of(s.tensor, 0), mask);
    };
  };
  EXPECT_CLEAN(kernel(0, false));
  EXPECT_FAULT("nothing has computed", kernel(1, false));
  EXPECT_CLEAN(kernel(0xFFFF, true));
  EXPECT_FAULT("nothing has computed", kernel(0xFFFE, true));
  EXPECT_CLEAN([] {  // a shift brings zeros in
    Scratch<uint32_t> s(8, false);
    AscendC::ShiftLeft(s.tensor, s.tensor, 32u, 8);
    EXPECT_EQ(value_of(s.tensor, 0), 0u);
  });
  EXPECT_FAULT("nothing has computed", [] {
    Scratch<uint32_t> s(8, false);
    AscendC::ShiftLeft(s.tensor, s.tensor, 31u, 8);
    value_of(s.tensor, 0);
  });
}

TEST(Buffers, Alignment) {
  EXPECT_FAULT("not aligned to 32", [] {
    Scratch<int32_t> s(64);
    Add(s.tensor[4], s.tensor[4], s.tensor[4], 8);
  });
  EXPECT_FAULT("not aligned to 32", [] {
    Scratch<int32_t> s(64);
    LocalTensor<int32_t> t = s.more<int32_t>(64);
    Add(t, s.tensor[4], t, 8);
  });
  EXPECT_CLEAN([] {
    Scratch<int32_t> s(64);
    Add(s.tensor[8], s.tensor[8], s.tensor[8], 8);
  });
}

}  // namespace
}  // namespace ngram_npu::twin
