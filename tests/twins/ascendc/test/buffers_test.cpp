// UB: bounds, lives of tensors, queues, poison, alignment.
#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::Add;
using AscendC::Duplicate;

TEST(Buffers, Bounds) {
  EXPECT_CLEAN(on<int32_t>([](auto&) {}));
  EXPECT_FAULT("of a tensor of 256 bytes", on<int32_t>([](auto& s) { Duplicate(s.tensor, 0, 65); }));
  EXPECT_FAULT("of a tensor of 256 bytes",
               on<int32_t>([](auto& s) { Add(s.tensor[32], s.tensor[32], s.tensor[32], 33); }));
  EXPECT_FAULT("GetValue(64) of 64", on<int32_t>([](auto& s) { s.tensor.GetValue(64); }));
  EXPECT_FAULT("SetValue(64) of 64", on<int32_t>([](auto& s) { s.tensor.SetValue(64, 0); }));
  EXPECT_FAULT("LocalTensor[65] of 64", on<int32_t>([](auto& s) { s.tensor[65]; }));
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
  const auto with = [](const auto& steps) {
    return [steps] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      steps(pipe, buffer);
    };
  };
  EXPECT_FAULT("a length of 0", with([](TPipe& pipe, auto& buffer) { pipe.InitBuffer(buffer, 0); }));
  EXPECT_FAULT("more than 64 buffers", with([](TPipe& pipe, auto& buffer) {
                 for (int i = 0; i < 65; ++i) pipe.InitBuffer(buffer, 32);
               }));
  EXPECT_FAULT("without InitBuffer", with([](TPipe&, auto& buffer) { buffer.template Get<int32_t>(); }));
  EXPECT_FAULT("a second one", with([](TPipe&, auto&) { TPipe two; }));
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
  const auto with = [](const auto& steps) {
    return [steps] {
      TPipe pipe;
      In queue;
      pipe.InitBuffer(queue, 3, 256);
      steps(queue);
    };
  };
  const auto with_one = [&](const auto& steps) {
    return with([steps](In& q) {
      LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
      steps(q, t);
    });
  };
  EXPECT_CLEAN(with_one([](In& q, auto& t) { q.FreeTensor(t); }));
  EXPECT_FAULT("was freed or is in the queue", with_one([](In& q, auto& t) {  // freed twice
                 q.FreeTensor(t);
                 q.FreeTensor(t);
               }));
  EXPECT_FAULT("was freed or is in the queue", with_one([](In& q, auto& t) {  // used after
                 q.FreeTensor(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("was freed or is in the queue", with_one([](In& q, auto& t) {  // used between EnQue and DeQue
                 q.EnQue(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("was freed or is in the queue", with_one([](In& q, auto& t) {  // freed while queued
                 q.EnQue(t);
                 q.FreeTensor(t);
               }));
  EXPECT_FAULT("never freed", with_one([](In& q, auto& t) { q.EnQue(t); }));  // left in the queue
  EXPECT_FAULT("empty queue", with([](In& q) { q.DeQue<int32_t>(); }));
  EXPECT_FAULT("its depth of 2", with([](In& q) {
                 for (int i = 0; i < 3; ++i) q.EnQue(q.AllocTensor<int32_t>());
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
    two.EnQue(one.AllocTensor<int32_t>());
  });
  EXPECT_FAULT("without InitBuffer", [] {
    TPipe pipe;
    In queue;
    queue.AllocTensor<int32_t>();
  });
}

// Poison may be moved, but not used.
TEST(Buffers, Poison) {
  EXPECT_FAULT("nothing has computed", on<int32_t>([](auto& s) { value_of(s.tensor, 0); }, false));
  const auto added = [](int32_t known, uint32_t read) {
    return on<int32_t>(
        [=](auto& s) {
          Add(s.tensor, s.tensor, s.tensor, 64);
          Duplicate(s.tensor, 3, known);
          EXPECT_EQ(value_of(s.tensor, read), 3);
        },
        false);
  };
  EXPECT_FAULT("nothing has computed", added(8, 8));
  EXPECT_CLEAN(added(8, 7));
  Tensor<int32_t> memory(64);
  const auto store = [&](int32_t known) {
    return on<int32_t>(
        [&memory, known](auto& s) {
          Duplicate(s.tensor, 7, known);
          settle();
          copy(memory.global(), s.tensor, 64);
        },
        false);
  };
  EXPECT_CLEAN(store(64), {memory.region()});
  EXPECT_EQ(memory.values[63], 7);
  EXPECT_FAULT("nothing has computed", store(56), {memory.region()});
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
      (use_or ? AscendC::Or<uint16_t> : AscendC::And<uint16_t>)(s.tensor, s.tensor, masks, 16);
      EXPECT_EQ(value_of(s.tensor, 0), mask);
    };
  };
  EXPECT_CLEAN(kernel(0, false));
  EXPECT_FAULT("nothing has computed", kernel(1, false));
  EXPECT_CLEAN(kernel(0xFFFF, true));
  EXPECT_FAULT("nothing has computed", kernel(0xFFFE, true));
  const auto moved = [](uint32_t bits) {
    return on<uint32_t>(
        [bits](auto& s) {
          AscendC::ShiftLeft(s.tensor, s.tensor, bits, 8);
          EXPECT_EQ(value_of(s.tensor, 0), 0u);
        },
        false);
  };
  EXPECT_CLEAN(moved(32));  // a shift brings zeros in
  EXPECT_FAULT("nothing has computed", moved(31));
}

TEST(Buffers, Alignment) {
  const auto added = [](uint32_t to, uint32_t from) {
    return on<int32_t>([=](auto& s) { Add(s.tensor[to], s.tensor[from], s.tensor[from], 8); });
  };
  EXPECT_FAULT("not aligned to 32", added(4, 4));
  EXPECT_FAULT("not aligned to 32", added(16, 4));
  EXPECT_CLEAN(added(8, 8));
}

}  // namespace
}  // namespace ngram_npu::twin
