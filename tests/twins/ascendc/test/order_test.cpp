// The order of the pipes: cases that need a queue, a flag or a barrier, and cases that the build orders by itself.
#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::Add;
using AscendC::Duplicate;
using AscendC::SetFlag;
using AscendC::WaitFlag;

class Order : public testing::Test {
 protected:
  using Step = void (*)(Order&, LocalTensor<int32_t>);

  // Two steps on one piece of UB, with `between` run between them.
  std::function<void()> steps(Step first, const std::function<void()>& between, Step second) {
    return [this, first, between, second] {
      Scratch<int32_t> s(64);
      settle();
      first(*this, s.tensor);
      between();
      second(*this, s.tensor);
    };
  }
  // Nothing but a flag of that event orders them.
  template <HardEvent event>
  void need(const char* says, Step first, Step second) {
    EXPECT_FAULT(says, steps(first, [] {}, second), regions);
    EXPECT_CLEAN(steps(first, order<event>, second), regions);
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
}

TEST_F(Order, ScalarStores) {
  need<HardEvent::S_V>("pipe V reads what pipe S wrote", scalar_write, compute);
  need<HardEvent::S_MTE3>("pipe MTE3 reads what pipe S wrote", scalar_write, copy_out);
  need<HardEvent::S_MTE2>("pipe MTE2 overwrites what pipe S wrote", scalar_write, copy_in);
  need<HardEvent::MTE3_S>("pipe S overwrites what pipe MTE3 reads", copy_out, scalar_write);
}

// The kernels order these themselves, although the compiler would by --cce-auto-sync.
TEST_F(Order, ScalarLoads) {
  need<HardEvent::V_S>("pipe S reads what pipe V wrote", compute, scalar_read);
  need<HardEvent::MTE2_S>("pipe S reads what pipe MTE2 wrote", copy_in, scalar_read);
  need<HardEvent::S_V>("pipe V overwrites what pipe S reads", scalar_read, compute);
  need<HardEvent::S_MTE2>("pipe MTE2 overwrites what pipe S reads", scalar_read, copy_in);
}

TEST_F(Order, TheWrongOrder) {
  EXPECT_FAULT("nothing orders them", steps(copy_in, order<HardEvent::V_MTE2>, compute), regions);
  // If S waited for V, MTE2's data is still unordered; if it waited for MTE2, all that it issues next is ordered.
  EXPECT_FAULT("nothing orders them", steps(copy_in, order<HardEvent::V_S>, compute), regions);
  EXPECT_CLEAN(steps(copy_in, order<HardEvent::MTE2_S>, compute), regions);
  // Order through a third pipe.
  EXPECT_CLEAN(steps(
                   copy_in,
                   [] {
                     order<HardEvent::MTE2_V>();
                     order<HardEvent::V_MTE3>();
                   },
                   copy_out),
               regions);
  // The flag is set before the instruction that it should cover.
  EXPECT_FAULT(
      "nothing orders them",
      [this] {
        Scratch<int32_t> s(64);
        settle();
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
        order<HardEvent::V_MTE3>();
        copy(target.global(), out.Get<int32_t>(), 64);
        order<HardEvent::MTE3_V>();
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
          order<HardEvent::V_MTE3>();
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
  EXPECT_CLEAN(in_pipe([] { order<HardEvent::V_MTE3>(); }));
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

TEST_F(Order, AKernelThatNeverEnds) {
  EXPECT_FAULT("does not seem to end", [] {
    TPipe pipe;
    for (;;) order<HardEvent::V_MTE3>();
  });
}

}  // namespace
}  // namespace ngram_npu::twin
