// Tests what the model checks in UB: bounds, lifetimes of tensors, queues, poison, alignment, the order of the pipes.
#include "twin_test.h"

namespace ngram_npu::twin {
namespace {

using AscendC::Duplicate;
using AscendC::Min;
using AscendC::SetFlag;
using AscendC::TEventID;
using AscendC::WaitFlag;

TEST(Buffers, AccessOutsideTensorIsReported) {
  EXPECT_CLEAN(make_scratch_kernel<int32_t>([](auto&) {}));
  EXPECT_FAULT("of a tensor of 256 bytes", make_scratch_kernel<int32_t>([](auto& s) { Duplicate(s.tensor, 0, 65); }));
  EXPECT_FAULT("GetValue(64) of 64", make_scratch_kernel<int32_t>([](auto& s) { s.tensor.GetValue(64); }));
  EXPECT_FAULT("SetValue(64) of 64", make_scratch_kernel<int32_t>([](auto& s) { s.tensor.SetValue(64, 0); }));
  EXPECT_FAULT("LocalTensor[65] of 64", make_scratch_kernel<int32_t>([](auto& s) { s.tensor[65]; }));
}

TEST(Buffers, InvalidInitBufferIsReported) {
  constexpr uint32_t budget = kChip.ub_bytes - kChip.ub_reserved_bytes;
  const auto make_kernel = [](uint32_t bytes) {
    return [bytes] {
      TPipe pipe;
      InputQueue queue;
      TBuf<TPosition::VECCALC> buffer;
      pipe.InitBuffer(queue, 2, 1000);  // rounded up to 1024 each
      pipe.InitBuffer(buffer, bytes - 2048);
    };
  };
  EXPECT_CLEAN(make_kernel(budget));
  EXPECT_FAULT("leave the", make_kernel(budget + 1));
  const auto make_buffer_kernel = [](const auto& function) {
    return [function] {
      TPipe pipe;
      TBuf<TPosition::VECCALC> buffer;
      function(pipe, buffer);
    };
  };
  EXPECT_FAULT("a length of 0", make_buffer_kernel([](TPipe& pipe, auto& buffer) { pipe.InitBuffer(buffer, 0); }));
  EXPECT_FAULT("more than 64 buffers", make_buffer_kernel([](TPipe& pipe, auto& buffer) {
                 for (int i = 0; i < 65; ++i) pipe.InitBuffer(buffer, 32);
               }));
  EXPECT_FAULT("without InitBuffer", make_buffer_kernel([](TPipe&, auto& buffer) { buffer.template Get<int32_t>(); }));
  EXPECT_FAULT("a second one", make_buffer_kernel([](TPipe&, auto&) { TPipe second; }));
  const auto make_queue_kernel = [](uint8_t num, int calls) {
    return [num, calls] {
      TPipe pipe;
      InputQueue queue;
      for (int i = 0; i < calls; ++i) pipe.InitBuffer(queue, num, 32);
    };
  };
  EXPECT_CLEAN(make_queue_kernel(64, 1));
  EXPECT_FAULT("0 buffers of a queue", make_queue_kernel(0, 1));
  EXPECT_FAULT("65 buffers of a queue", make_queue_kernel(65, 1));
  EXPECT_FAULT("has buffers already", make_queue_kernel(1, 2));
}

TEST(Buffers, MisuseOfQueueIsReported) {
  const auto make_queue_kernel = [](const auto& function) {
    return [function] {
      TPipe pipe;
      InputQueue queue;
      pipe.InitBuffer(queue, 3, 256);
      function(queue);
    };
  };
  const auto make_tensor_kernel = [&](const auto& function) {
    return make_queue_kernel([function](InputQueue& q) {
      LocalTensor<int32_t> t = q.AllocTensor<int32_t>();
      function(q, t);
    });
  };
  EXPECT_CLEAN(make_tensor_kernel([](InputQueue& q, auto& t) { q.FreeTensor(t); }));
  EXPECT_FAULT("was freed or is in the queue", make_tensor_kernel([](InputQueue& q, auto& t) {  // used after FreeTensor
                 q.FreeTensor(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("was freed or is in the queue",
               make_tensor_kernel([](InputQueue& q, auto& t) {  // used between EnQue and DeQue
                 q.EnQue(t);
                 Duplicate(t, 0, 8);
               }));
  EXPECT_FAULT("never freed", make_tensor_kernel([](InputQueue&, auto&) {}));
  EXPECT_FAULT("empty queue", make_queue_kernel([](InputQueue& q) { q.DeQue<int32_t>(); }));
  EXPECT_FAULT("its depth of 2", make_queue_kernel([](InputQueue& q) {
                 for (int i = 0; i < 3; ++i) q.EnQue(q.AllocTensor<int32_t>());
               }));
  // Each queued tensor needs an event ID, so a deep queue does not hold more tensors than there are IDs.
  EXPECT_FAULT("no event ID left of MTE2_V", [] {
    TPipe pipe;
    TQue<TPosition::VECIN, 8> queue;
    pipe.InitBuffer(queue, 8, 256);
    for (int i = 0; i < 7; ++i) queue.EnQue(queue.AllocTensor<int32_t>());
  });
  EXPECT_FAULT("would hang", make_queue_kernel([](InputQueue& q) {
                 for (int i = 0; i < 4; ++i) q.AllocTensor<int32_t>();
               }));
  EXPECT_FAULT("not this queue's", [] {
    TPipe pipe;
    InputQueue first_queue;
    InputQueue second_queue;
    pipe.InitBuffer(first_queue, 1, 256);
    pipe.InitBuffer(second_queue, 1, 256);
    second_queue.EnQue(first_queue.AllocTensor<int32_t>());
  });
  EXPECT_FAULT("without InitBuffer", [] {
    TPipe pipe;
    InputQueue queue;
    queue.AllocTensor<int32_t>();
  });
}

// A kernel may compute with poison, but must not use the result.
TEST(Buffers, UseOfPoisonIsReported) {
  EXPECT_FAULT("uninitialized UB", make_scratch_kernel<int32_t>([](auto& s) { read_element(s.tensor, 0); }, false));
  // Initializes the first num_initialized elements and reads one element.
  const auto make_read_kernel = [](int32_t num_initialized, uint32_t index) {
    return make_scratch_kernel<int32_t>(
        [=](auto& s) {
          Min(s.tensor, s.tensor, s.tensor, 64);
          Duplicate(s.tensor, 3, num_initialized);
          EXPECT_EQ(read_element(s.tensor, index), 3);
        },
        false);
  };
  EXPECT_FAULT("uninitialized UB", make_read_kernel(8, 8));
  EXPECT_CLEAN(make_read_kernel(8, 7));
  Tensor<int32_t> memory(64);
  const auto make_store_kernel = [&](int32_t num_initialized) {
    return make_scratch_kernel<int32_t>(
        [&memory, num_initialized](auto& s) {
          Duplicate(s.tensor, 7, num_initialized);
          sync_all_pipes();
          copy(memory.global(), s.tensor, 64);
        },
        false);
  };
  EXPECT_CLEAN(make_store_kernel(64), {memory.region()});
  EXPECT_EQ(memory.values[63], 7);
  EXPECT_FAULT("uninitialized UB", make_store_kernel(56), {memory.region()});
  // A queue's buffer is poison when it is allocated again.
  EXPECT_FAULT("uninitialized UB", [] {
    TPipe pipe;
    InputQueue queue;
    pipe.InitBuffer(queue, 1, 256);
    LocalTensor<int32_t> t = queue.AllocTensor<int32_t>();
    Duplicate(t, 7, 64);
    queue.FreeTensor(t);
    t = queue.AllocTensor<int32_t>();
    read_element(t, 0);
  });
}

// Bits that a mask clears or sets are known, even if the operand was poison.
TEST(Buffers, MasksAndShiftsPropagatePoisonByBit) {
  const auto make_mask_kernel = [](uint16_t mask, bool use_or) {
    return [mask, use_or] {
      Scratch<uint16_t> s(16, false);
      LocalTensor<uint16_t> masks = s.allocate<uint16_t>(16);
      Duplicate(masks, mask, 16);
      (use_or ? AscendC::Or<uint16_t> : AscendC::And<uint16_t>)(s.tensor, s.tensor, masks, 16);
      EXPECT_EQ(read_element(s.tensor, 0), mask);
    };
  };
  EXPECT_CLEAN(make_mask_kernel(0, false));
  EXPECT_FAULT("uninitialized UB", make_mask_kernel(1, false));
  EXPECT_CLEAN(make_mask_kernel(0xFFFF, true));
  EXPECT_FAULT("uninitialized UB", make_mask_kernel(0xFFFE, true));
  const auto make_shift_kernel = [](uint32_t num_bits) {
    return make_scratch_kernel<uint32_t>(
        [num_bits](auto& s) {
          AscendC::ShiftLeft(s.tensor, s.tensor, num_bits, 8);
          EXPECT_EQ(read_element(s.tensor, 0), 0u);
        },
        false);
  };
  EXPECT_CLEAN(make_shift_kernel(32));  // a shift inserts zeros
  EXPECT_FAULT("uninitialized UB", make_shift_kernel(31));
}

TEST(Buffers, UnalignedOperandIsReported) {
  const auto make_kernel = [](uint32_t dst, uint32_t src) {
    return make_scratch_kernel<int32_t>([=](auto& s) { Min(s.tensor[dst], s.tensor[src], s.tensor[src], 8); });
  };
  EXPECT_FAULT("not aligned to 32", make_kernel(4, 4));
  EXPECT_FAULT("not aligned to 32", make_kernel(16, 4));
  EXPECT_CLEAN(make_kernel(8, 8));
}

// Tests of the order of the pipes. Accesses of different pipes require a queue or a flag.
class PipeOrder : public testing::Test {
 protected:
  using Access = void (*)(PipeOrder&, LocalTensor<int32_t>);

  // Returns a kernel with two accesses to the same tensor in UB, and `synchronize` between the accesses.
  std::function<void()> make_kernel(Access first, const std::function<void()>& synchronize, Access second) {
    return [this, first, synchronize, second] {
      Scratch<int32_t> s(64);
      sync_all_pipes();
      first(*this, s.tensor);
      synchronize();
      second(*this, s.tensor);
    };
  }
  // Expects a fault with this message unless a flag of the event is between the accesses.
  template <HardEvent event>
  void expect_flag_required(const char* message, Access first, Access second) {
    EXPECT_FAULT(message, make_kernel(first, [] {}, second), regions);
    EXPECT_CLEAN(make_kernel(first, sync_pipes<event>, second), regions);
  }
  static void copy_in(PipeOrder& test, LocalTensor<int32_t> t) { copy(t, test.memory.global(), 64); }
  static void copy_out(PipeOrder& test, LocalTensor<int32_t> t) { copy(test.target.global(), t, 64); }
  static void compute(PipeOrder&, LocalTensor<int32_t> t) { Min(t, t, t, 64); }
  static void write_scalar(PipeOrder&, LocalTensor<int32_t> t) { t.SetValue(0, 5); }
  static void read_scalar(PipeOrder&, LocalTensor<int32_t> t) { t.GetValue(0); }

  Tensor<int32_t> memory{64, 3};
  Tensor<int32_t> target{64};
  std::vector<Region> regions{memory.region(false), target.region()};
};

TEST_F(PipeOrder, AccessesOfTwoPipesRequireFlag) {
  expect_flag_required<HardEvent::MTE2_V>("pipe V reads what pipe MTE2 wrote", copy_in, compute);
  expect_flag_required<HardEvent::V_MTE3>("pipe MTE3 reads what pipe V wrote", compute, copy_out);
  expect_flag_required<HardEvent::MTE2_MTE3>("pipe MTE3 reads what pipe MTE2 wrote", copy_in, copy_out);
  expect_flag_required<HardEvent::V_MTE2>("pipe MTE2 overwrites what pipe V", compute, copy_in);
  expect_flag_required<HardEvent::MTE3_V>("pipe V overwrites what pipe MTE3 reads", copy_out, compute);
  expect_flag_required<HardEvent::MTE3_MTE2>("pipe MTE2 overwrites what pipe MTE3 reads", copy_out, copy_in);
  EXPECT_CLEAN(make_kernel(compute, [] {}, compute), regions);  // within V, the compiler or the chip keeps the order
  expect_flag_required<HardEvent::S_V>("pipe V reads what pipe S wrote", write_scalar, compute);
  expect_flag_required<HardEvent::S_MTE3>("pipe MTE3 reads what pipe S wrote", write_scalar, copy_out);
  expect_flag_required<HardEvent::S_MTE2>("pipe MTE2 overwrites what pipe S wrote", write_scalar, copy_in);
  expect_flag_required<HardEvent::MTE3_S>("pipe S overwrites what pipe MTE3 reads", copy_out, write_scalar);
  // The kernels order scalar loads with flags, because they must not depend on --cce-auto-sync.
  expect_flag_required<HardEvent::V_S>("pipe S reads what pipe V wrote", compute, read_scalar);
  expect_flag_required<HardEvent::MTE2_S>("pipe S reads what pipe MTE2 wrote", copy_in, read_scalar);
  expect_flag_required<HardEvent::S_V>("pipe V overwrites what pipe S reads", read_scalar, compute);
  expect_flag_required<HardEvent::S_MTE2>("pipe MTE2 overwrites what pipe S reads", read_scalar, copy_in);
}

TEST_F(PipeOrder, FlagOfOtherPipesDoesNotOrderAccesses) {
  EXPECT_FAULT("nothing orders the accesses", make_kernel(copy_in, sync_pipes<HardEvent::V_MTE2>, compute), regions);
  // If S has waited for V, accesses to MTE2's data are still unordered. If S has waited for MTE2, all instructions that
  // S issues afterwards are ordered.
  EXPECT_FAULT("nothing orders the accesses", make_kernel(copy_in, sync_pipes<HardEvent::V_S>, compute), regions);
  EXPECT_CLEAN(make_kernel(copy_in, sync_pipes<HardEvent::MTE2_S>, compute), regions);
  // The flag is set before the copy, so waiting for the flag does not order the copy.
  EXPECT_FAULT(
      "nothing orders the accesses",
      [this] {
        Scratch<int32_t> s(64);
        sync_all_pipes();
        const TEventID id = GetTPipePtr()->AllocEventID<HardEvent::MTE2_V>();
        SetFlag<HardEvent::MTE2_V>(id);
        copy_in(*this, s.tensor);
        WaitFlag<HardEvent::MTE2_V>(id);
        compute(*this, s.tensor);
      },
      regions);
}

TEST_F(PipeOrder, QueueOrdersItsTwoPipes) {
  const auto make_kernel = [this](bool uses_queue) {
    return [this, uses_queue] {
      TPipe pipe;
      InputQueue in;
      pipe.InitBuffer(in, 2, 256);
      TBuf<TPosition::VECOUT> out;
      pipe.InitBuffer(out, 256);
      for (int i = 0; i < 6; ++i) {
        LocalTensor<int32_t> x = in.AllocTensor<int32_t>();
        copy(x, memory.global(), 64);
        if (uses_queue) {
          in.EnQue(x);
          x = in.DeQue<int32_t>();
        }
        Min(out.Get<int32_t>(), x, x, 64);
        in.FreeTensor(x);
        sync_pipes<HardEvent::V_MTE3>();
        copy(target.global(), out.Get<int32_t>(), 64);
        sync_pipes<HardEvent::MTE3_V>();
      }
    };
  };
  EXPECT_CLEAN(make_kernel(true), regions);
  EXPECT_EQ(target.values[63], 3);
  EXPECT_FAULT("pipe V reads what pipe MTE2 wrote", make_kernel(false), regions);
  // A queue at VECIN waits only for V before it reuses a buffer, so it may reuse a buffer that MTE3 still reads.
  EXPECT_FAULT(
      "pipe MTE2 overwrites what pipe MTE3 reads",
      [this] {
        TPipe pipe;
        InputQueue in;
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

TEST_F(PipeOrder, MisuseOfFlagIsReported) {
  const auto make_kernel = [](const std::function<void()>& function) {
    return [function] {
      TPipe pipe;
      function();
    };
  };
  EXPECT_CLEAN(make_kernel([] { sync_pipes<HardEvent::V_MTE3>(); }));
  EXPECT_FAULT("never set", make_kernel([] { WaitFlag<HardEvent::V_MTE3>(0); }));
  EXPECT_FAULT("never set", make_kernel([] {
                 SetFlag<HardEvent::V_MTE3>(0);
                 WaitFlag<HardEvent::V_MTE3>(1);
               }));
  EXPECT_FAULT("set already", make_kernel([] {
                 SetFlag<HardEvent::V_MTE3>(0);
                 SetFlag<HardEvent::V_MTE3>(0);
               }));
  EXPECT_FAULT("never waited for", make_kernel([] { SetFlag<HardEvent::V_MTE3>(0); }));
  EXPECT_FAULT("the IDs are 0 to 5", make_kernel([] { SetFlag<HardEvent::V_MTE3>(6); }));
  EXPECT_FAULT("no TPipe", [] { GetTPipePtr(); });
}

TEST_F(PipeOrder, HeldIdRequiresReservation) {
  // Returns a kernel that computes between setting and waiting for a flag.
  const auto make_kernel = [](bool is_reserved, const std::function<void(TEventID)>& release) {
    return [=] {
      Scratch<int32_t> s(64);
      TPipe& pipe = *GetTPipePtr();
      const TEventID id = is_reserved ? pipe.AllocEventID<HardEvent::V_MTE3>() : pipe.FetchEventID(HardEvent::V_MTE3);
      SetFlag<HardEvent::V_MTE3>(id);
      Duplicate(s.tensor, 0, 64);
      WaitFlag<HardEvent::V_MTE3>(id);
      release(id);
    };
  };
  const auto release = [](TEventID id) { GetTPipePtr()->ReleaseEventID<HardEvent::V_MTE3>(id); };
  EXPECT_CLEAN(make_kernel(true, release));
  EXPECT_FAULT("FetchEventID does not reserve IDs", make_kernel(false, [](TEventID) {}));
  EXPECT_FAULT("not allocated", make_kernel(true, [&](TEventID id) {
                 release(id);
                 release(id);
               }));
  EXPECT_FAULT("set, and not waited for", make_kernel(true, [&](TEventID id) {
                 SetFlag<HardEvent::V_MTE3>(id);
                 release(id);
               }));
  EXPECT_FAULT("no event ID left", make_kernel(true, [&](TEventID) {
                 for (int i = 0; i < 6; ++i) GetTPipePtr()->AllocEventID<HardEvent::V_MTE3>();
               }));
}

TEST_F(PipeOrder, EndlessKernelIsReported) {
  EXPECT_FAULT("does not seem to end", [] {
    TPipe pipe;
    for (;;) sync_pipes<HardEvent::V_MTE3>();
  });
}

}  // namespace
}  // namespace ngram_npu::twin
