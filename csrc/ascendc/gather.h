// Gathers array items at the indices of a pass (the items that a core processes at a time), with vector
// instructions and without branches. A flag is an int32, 0 or 1, that selects a value by multiplication. The 910B
// compares int32 only for equality, so a flag is computed from a difference d: clamp(d, -1, 1) squared is d != 0, and
// clamp(d, 0, 1) is d > 0. Sums, differences and products of int32 wrap.
#pragma once

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

using Ints = AscendC::LocalTensor<int32_t>;

// Sets the nonzero items of the first n values to 1.
__aicore__ inline void convert_to_flags(const Ints& values, int32_t n) {
  AscendC::Maxs(values, values, -1, n);
  AscendC::Mins(values, values, 1, n);
  AscendC::Mul(values, values, values, n);
}

// Copies the items of `source` whose flag is 1 to `destination`. Overwrites `source`.
__aicore__ inline void select(const Ints& destination, const Ints& source, const Ints& flags, int32_t n) {
  AscendC::Sub(source, source, destination, n);
  AscendC::Mul(source, source, flags, n);
  AscendC::Add(destination, destination, source, n);
}

// The part of an IndexArray that belongs to a pass, as int32. Cast saturates, so an int64 out of the range of int32
// becomes the smallest or largest int32, which is also outside of every array.
class PassIndices : public PassIndicesLayout {
 public:
  __aicore__ inline PassIndices(AscendC::TPipe& pipe, const IndexArray& indices, int64_t capacity)
      : indices_(indices), int32_indices_(pipe, capacity), int64_indices_(pipe, indices.bytes == 8 ? capacity : 1) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    first_ = static_cast<int32_t>(first);
    if (indices_.bytes == 4) int32_indices_.load(0, static_cast<Gm<const int32_t>>(indices_.data) + first, count);
    if (indices_.bytes == 8) int64_indices_.load(0, static_cast<Gm<const int64_t>>(indices_.data) + first, count);
  }
  // Returns the first n indices as int32; without an array (0 bytes), index i is i. load() must have completed.
  __aicore__ inline const Ints& convert(int32_t n) const {
    if (indices_.bytes == 0) AscendC::CreateVecIndex(int32_indices_.tensor(), first_, static_cast<uint32_t>(n));
    if (indices_.bytes == 8) {  // from int64 to int32, the 910B and the 950 support only CAST_NONE
      AscendC::Cast(int32_indices_.tensor(), int64_indices_.tensor(), AscendC::RoundMode::CAST_NONE,
                    static_cast<uint32_t>(n));
    }
    return int32_indices_.tensor();
  }

 private:
  const IndexArray indices_;
  LocalBuffer<int32_t> int32_indices_;
  LocalBuffer<int64_t> int64_indices_;
  int32_t first_ = 0;
};

// Converts indices to byte offsets into the staged part of an array, and flags the indices that are in this part. The
// part has at most kMaxStagedItems items and begins at item `first` of the array.
class GatherOffsets : public GatherOffsetsLayout {
 public:
  __aicore__ inline GatherOffsets(AscendC::TPipe& pipe, int64_t capacity)
      : offsets_(pipe, capacity), range_flags_(pipe, capacity) {}

  __aicore__ inline void compute(const Ints& indices, int64_t first, int64_t size, int32_t n) {
    first_ = first;
    const auto begin = static_cast<int32_t>(first);
    const Ints& offsets = offsets_.tensor();
    const Ints& range_flags = range_flags_.tensor();
    AscendC::Maxs(offsets, indices, begin, n);
    AscendC::Mins(offsets, offsets, static_cast<int32_t>(smaller(first + kMaxStagedItems, size) - 1), n);
    AscendC::Sub(range_flags, indices, offsets, n);
    convert_to_flags(range_flags, n);
    AscendC::Muls(range_flags, range_flags, -1, n);
    AscendC::Adds(range_flags, range_flags, 1, n);
    AscendC::Adds(offsets, offsets, -begin, n);
    AscendC::Muls(offsets, offsets, int32_t{sizeof(int32_t)}, n);
  }

  __aicore__ inline int64_t first() const { return first_; }
  // Returns offsets in bytes. For an index outside the staged part, this is the offset of the nearest item.
  __aicore__ inline AscendC::LocalTensor<uint32_t> offsets() const {
    return offsets_.tensor().template ReinterpretCast<uint32_t>();
  }
  __aicore__ inline const Ints& range_flags() const { return range_flags_.tensor(); }

 private:
  LocalBuffer<int32_t> offsets_, range_flags_;
  int64_t first_ = 0;
};

// An int32 array from which vector instructions gather. A part of the array, usually all of it, is in the unified
// buffer.
class GatherSource : public GatherSourceLayout {
 public:
  const int64_t size;

  __aicore__ inline GatherSource(AscendC::TPipe& pipe, Gm<const int32_t> array, int64_t items)
      : size(items), array_(array), staged_(pipe, smaller(items, kMaxStagedItems)) {}

  __aicore__ inline void load(int64_t first = 0) {
    staged_first_ = first;
    staged_.load(0, array_ + first, smaller(kMaxStagedItems, size - first));
  }
  __aicore__ inline void gather(const Ints& destination, const GatherOffsets& gather_offsets, int32_t n) {
    if (staged_first_ != gather_offsets.first()) {
      sync_pipes<AscendC::HardEvent::V_MTE2>();
      load(gather_offsets.first());
      sync_pipes<AscendC::HardEvent::MTE2_V>();
    }
    AscendC::Gather(destination, staged_.tensor(), gather_offsets.offsets(), 0, static_cast<uint32_t>(n));
  }

 private:
  const Gm<const int32_t> array_;
  LocalBuffer<int32_t> staged_;
  int64_t staged_first_ = 0;
};

}  // namespace ngram_npu::ascendc
