// UB: bounds, lifetimes of tensors, queues, poison, alignment; and the order of the pipes.
#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::Add;
using AscendC::Duplicate;
using AscendC::SetFlag;
using AscendC::WaitFlag;

TEST(Buffers, Bounds) {
  EXPECT_CLEAN(on<int32_t>([](auto&) {}));
  EXPECT_FAULT("of a tensor of 256 bytes", on<int32_t>([](auto& s) { Duplicate(s.tensor, 0, 65); }));
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
  EXPECT_FAULT("was freed or is in the queue", with_one([](In& q, auto& t) {  // used after
                 q.FreeTensor(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("was freed or is in the queue", with_one([](In& q, auto& t) {  // used between EnQue and DeQue
                 q.EnQue(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("never freed", with_one([](In&, auto&) {}));
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
          sync_all_pipes();
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
      LocalTensor<uint16_t> masks = s.allocate<uint16_t>(16);
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
  EXPECT_CLEAN(moved(32));  // a shift inserts zeros
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

// The order of the pipes: cases that need a queue, a flag or a barrier, and cases that the build orders by itself.
class Order : public testing::Test {
 protected:
  using Step = void (*)(Order&, LocalTensor<int32_t>);

  // Two steps on one piece of UB, with `between` run between them.
  std::function<void()> steps(Step first, const std::function<void()>& between, Step second) {
    return [this, first, between, second] {
      Scratch<int32_t> s(64);
      sync_all_pipes();
      first(*this, s.tensor);
      between();
      second(*this, s.tensor);
    };
  }
  // Only a flag of that event orders them.
  template <HardEvent event>
  void need(const char* message, Step first, Step second) {
    EXPECT_FAULT(message, steps(first, [] {}, second), regions);
    EXPECT_CLEAN(steps(first, sync_pipes<event>, second), regions);
  }
  static void copy_in(Order& o, LocalTensor<int32_t> t) { copy(t, o.memory.global(), 64); }
  static void copy_out(Order& o, LocalTensor<int32_t> t) { copy(o.target.global(), t, 64); }
  static void compute(Order&, LocalTensor<int32_t> t) { Add(t, t, t, 64); }
  static void scalar_write(Order&, LocalTensor<int32_t> t) { t.SetValue(0, 5); }
  static void scalar_read(Order&, LocalTensor<int32_t> t) { t.GetValue(0); }

  Tensor<int32_t> memory{64, 3};
  Tensor<int32_t> target{64};
  std::vector<Region> regions{memory.region(false), target.region()};
};

TEST_F(Order, BetweenPipes) {
  need<HardEvent::MTE2_V>("pipe V reads what pipe MTE2 wrote", copy_in, compute);
  need<HardEvent::V_MTE3>("pipe MTE3 reads what pipe V wrote", compute, copy_out);
  need<HardEvent::MTE2_MTE3>("pipe MTE3 reads what pipe MTE2 wrote", copy_in, copy_out);
  need<HardEvent::V_MTE2>("pipe MTE2 overwrites what pipe V", compute, copy_in);
  need<HardEvent::MTE3_V>("pipe V overwrites what pipe MTE3 reads", copy_out, compute);
  need<HardEvent::MTE3_MTE2>("pipe MTE2 overwrites what pipe MTE3 reads", copy_out, copy_in);
  EXPECT_CLEAN(steps(compute, [] {}, compute), regions);  // within V the build or the chip keeps the order
  need<HardEvent::S_V>("pipe V reads what pipe S wrote", scalar_write, compute);
  need<HardEvent::S_MTE3>("pipe MTE3 reads what pipe S wrote", scalar_write, copy_out);
  need<HardEvent::S_MTE2>("pipe MTE2 overwrites what pipe S wrote", scalar_write, copy_in);
  need<HardEvent::MTE3_S>("pipe S overwrites what pipe MTE3 reads", copy_out, scalar_write);
  // The kernels order scalar loads themselves, although the compiler would by --cce-auto-sync.
  need<HardEvent::V_S>("pipe S reads what pipe V wrote", compute, scalar_read);
  need<HardEvent::MTE2_S>("pipe S reads what pipe MTE2 wrote", copy_in, scalar_read);
  need<HardEvent::S_V>("pipe V overwrites what pipe S reads", scalar_read, compute);
  need<HardEvent::S_MTE2>("pipe MTE2 overwrites what pipe S reads", scalar_read, copy_in);
}

TEST_F(Order, WrongFlagDoesNotOrder) {
  EXPECT_FAULT("nothing orders them", steps(copy_in, sync_pipes<HardEvent::V_MTE2>, compute), regions);
  // If S waited for V, MTE2's data is still unordered; if it waited for MTE2, all that it issues next is ordered.
  EXPECT_FAULT("nothing orders them", steps(copy_in, sync_pipes<HardEvent::V_S>, compute), regions);
  EXPECT_CLEAN(steps(copy_in, sync_pipes<HardEvent::MTE2_S>, compute), regions);
  // The flag is set before the instruction that it should cover.
  EXPECT_FAULT(
      "nothing orders them",
      [this] {
        Scratch<int32_t> s(64);
        sync_all_pipes();
        SetFlag<HardEvent::MTE2_V>(0);
        copy_in(*this, s.tensor);
        WaitFlag<HardEvent::MTE2_V>(0);
        compute(*this, s.tensor);
      },
      regions);
}

TEST_F(Order, Queues) {
  const auto kernel = [this](bool through_the_queue) {
    return [this, through_the_queue] {
      TPipe pipe;
      In in;
      pipe.InitBuffer(in, 2, 256);
      TBuf<TPosition::VECOUT> out;
      pipe.InitBuffer(out, 256);
      for (int i = 0; i < 6; ++i) {
        LocalTensor<int32_t> x = in.AllocTensor<int32_t>();
        copy(x, memory.global(), 64);
        if (through_the_queue) {
          in.EnQue(x);
          x = in.DeQue<int32_t>();
        }
        Add(out.Get<int32_t>(), x, x, 64);
        in.FreeTensor(x);
        sync_pipes<HardEvent::V_MTE3>();
        copy(target.global(), out.Get<int32_t>(), 64);
        sync_pipes<HardEvent::MTE3_V>();
      }
    };
  };
  EXPECT_CLEAN(kernel(true), regions);
  EXPECT_EQ(target.values[63], 6);
  EXPECT_FAULT("pipe V reads what pipe MTE2 wrote", kernel(false), regions);
  // A VECIN buffer that MTE3 reads is freed too early: its queue waits for V only.
  EXPECT_FAULT(
      "pipe MTE2 overwrites what pipe MTE3 reads",
      [this] {
        TPipe pipe;
        In in;
        pipe.InitBuffer(in, 1, 256);
        for (int i = 0; i < 2; ++i) {
          LocalTensor<int32_t> x = in.AllocTensor<int32_t>();
          copy(x, memory.global(), 64);
          in.EnQue(x);
          x = in.DeQue<int32_t>();
          sync_pipes<HardEvent::V_MTE3>();
          copy(target.global(), x, 64);
          in.FreeTensor(x);
        }
      },
      regions);
}

TEST_F(Order, Flags) {
  const auto in_pipe = [](const std::function<void()>& steps) {
    return [steps] {
      TPipe pipe;
      steps();
    };
  };
  EXPECT_CLEAN(in_pipe([] { sync_pipes<HardEvent::V_MTE3>(); }));
  EXPECT_FAULT("never set", in_pipe([] { WaitFlag<HardEvent::V_MTE3>(0); }));
  EXPECT_FAULT("never set", in_pipe([] {
                 SetFlag<HardEvent::V_MTE3>(0);
                 WaitFlag<HardEvent::V_MTE3>(1);
               }));
  EXPECT_FAULT("set already", in_pipe([] {
                 SetFlag<HardEvent::V_MTE3>(0);
                 SetFlag<HardEvent::V_MTE3>(0);
               }));
  EXPECT_FAULT("never waited for", in_pipe([] { SetFlag<HardEvent::V_MTE3>(0); }));
  EXPECT_FAULT("the IDs are 0 to 5", in_pipe([] { SetFlag<HardEvent::V_MTE3>(6); }));
  EXPECT_FAULT("no TPipe", [] { GetTPipePtr(); });
}

TEST_F(Order, EndlessKernelIsReported) {
  EXPECT_FAULT("does not seem to end", [] {
    TPipe pipe;
    for (;;) sync_pipes<HardEvent::V_MTE3>();
  });
}

}  // namespace
}  // namespace ngram_npu::twin
