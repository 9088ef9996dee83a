// Gathers array items at the indices of a pass, with vector instructions and without branches. Flags, which are int32s
// of 0 and 1, select values by multiplication. Flags are computed from differences by clamping, to [-1, 1] before
// squaring or to [0, 1], because the 910B compares int32 only for equality. Sums, differences and products of int32
// wrap.
#pragma once

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

using Ints = AscendC::LocalTensor<int32_t>;

// Sets nonzero values to 1.
__aicore__ inline void to_flags(const Ints& values, int32_t n) {
  AscendC::Maxs(values, values, -1, n);
  AscendC::Mins(values, values, 1, n);
  AscendC::Mul(values, values, values, n);
}

// Copies `from` to `to` where the flag is 1. Overwrites `from`.
__aicore__ inline void select(const Ints& to, const Ints& from, const Ints& flags, int32_t n) {
  AscendC::Sub(from, from, to, n);
  AscendC::Mul(from, from, flags, n);
  AscendC::Add(to, to, from, n);
}

// The part of an IndexArray that belongs to a pass, as int32. Cast saturates, so an int64 out of the range of int32
// becomes the smallest or largest int32, which is also outside of every array.
class PassIndices {
 public:
  __aicore__ inline PassIndices(AscendC::TPipe& pipe, const IndexArray& indices, int64_t capacity)
      : indices_(indices), narrow_(pipe, capacity), wide_(pipe, indices.bytes == 8 ? capacity : 1) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    first_ = static_cast<int32_t>(first);
    if (indices_.bytes == 4) narrow_.load(0, static_cast<Gm<const int32_t>>(indices_.data) + first, count);
    if (indices_.bytes == 8) wide_.load(0, static_cast<Gm<const int64_t>>(indices_.data) + first, count);
  }
  // Returns the first n indices as int32; call it after load() has completed.
  __aicore__ inline const Ints& convert(int32_t n) const {
    if (indices_.bytes == 0) AscendC::CreateVecIndex(narrow_.tensor(), first_, static_cast<uint32_t>(n));
    if (indices_.bytes == 8) {  // both chips support only CAST_NONE from int64 to int32
      AscendC::Cast(narrow_.tensor(), wide_.tensor(), AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(n));
    }
    return narrow_.tensor();
  }

 private:
  const IndexArray indices_;
  LocalBuffer<int32_t> narrow_;
  LocalBuffer<int64_t> wide_;
  int32_t first_ = 0;
};

// Converts indices to byte offsets into the staged part of an array, which has at most kMaxStagedItems items and begins
// at item `first`, and flags the indices that are in this part.
class GatherOffsets {
 public:
  __aicore__ inline GatherOffsets(AscendC::TPipe& pipe, int64_t capacity)
      : offsets_(pipe, capacity), in_range_(pipe, capacity) {}

  __aicore__ inline void compute(const Ints& indices, int64_t first, int64_t size, int32_t n) {
    first_ = first;
    const auto begin = static_cast<int32_t>(first);
    const Ints& offsets = offsets_.tensor();
    const Ints& in_range = in_range_.tensor();
    AscendC::Maxs(offsets, indices, begin, n);
    AscendC::Mins(offsets, offsets, static_cast<int32_t>(smaller(first + kMaxStagedItems, size) - 1), n);
    AscendC::Sub(in_range, indices, offsets, n);
    to_flags(in_range, n);
    AscendC::Muls(in_range, in_range, -1, n);
    AscendC::Adds(in_range, in_range, 1, n);
    AscendC::Adds(offsets, offsets, -begin, n);
    AscendC::Muls(offsets, offsets, int32_t{sizeof(int32_t)}, n);
  }

  __aicore__ inline int64_t first() const { return first_; }
  // Returns offsets in bytes. For an index outside the staged part, this is the offset of the nearest item.
  __aicore__ inline AscendC::LocalTensor<uint32_t> offsets() const {
    return offsets_.tensor().template ReinterpretCast<uint32_t>();
  }
  __aicore__ inline const Ints& in_range() const { return in_range_.tensor(); }

 private:
  LocalBuffer<int32_t> offsets_, in_range_;
  int64_t first_ = 0;
};

// An int32 array from which vector instructions gather. A part of it, usually all of it, is in the unified buffer.
class GatherSource {
 public:
  const int64_t size;

  __aicore__ inline GatherSource(AscendC::TPipe& pipe, Gm<const int32_t> array, int64_t items)
      : size(items), array_(array), staged_(pipe, larger<int64_t>(smaller(items, kMaxStagedItems), 1)) {}

  __aicore__ inline void load(int64_t first = 0) {
    staged_first_ = first;
    staged_.load(0, array_ + first, smaller(kMaxStagedItems, size - first));
  }
  __aicore__ inline void gather(const Ints& to, const GatherOffsets& gather_offsets, int32_t n) {
    if (staged_first_ != gather_offsets.first()) {
      sync_pipes<AscendC::HardEvent::V_MTE2>();
      load(gather_offsets.first());
      sync_pipes<AscendC::HardEvent::MTE2_V>();
    }
    AscendC::Gather(to, staged_.tensor(), gather_offsets.offsets(), 0, static_cast<uint32_t>(n));
  }

 private:
  const Gm<const int32_t> array_;
  LocalBuffer<int32_t> staged_;
  int64_t staged_first_ = 0;
};

}  // namespace ngram_npu::ascendc
