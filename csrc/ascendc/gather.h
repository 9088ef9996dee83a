// Array lookups by the indices of a pass, with vectors and without branches: flags, int32s of 0 and 1, select values by
// multiplication. The 910B compares int32 only for equality, so a flag is a difference that is clamped to [0, 1]. Sums,
// differences and products of int32 wrap.
#pragma once

#include "ascendc/device.h"

namespace ngram_npu::ascendc {

using Ints = AscendC::LocalTensor<int32_t>;

// Replaces nonzero values by 1.
__aicore__ inline void to_flags(const Ints& values, int32_t n) {
  AscendC::Maxs(values, values, -1, n);
  AscendC::Mins(values, values, 1, n);
  AscendC::Mul(values, values, values, n);
}

// Where the flag is 1, `to` becomes `from`. Overwrites `from`.
__aicore__ inline void select(const Ints& to, const Ints& from, const Ints& flags, int32_t n) {
  AscendC::Sub(from, from, to, n);
  AscendC::Mul(from, from, flags, n);
  AscendC::Add(to, to, from, n);
}

// The part of an IndexArray that belongs to a pass, as int32. Cast saturates, so an int64 out of range becomes the
// smallest or largest int32, which is still outside of every array.
class PassIndices {
 public:
  __aicore__ inline PassIndices(AscendC::TPipe& pipe, const IndexArray& indices, int64_t capacity)
      : indices_(indices), narrow_(pipe, capacity), wide_(pipe, indices.bytes == 8 ? capacity : 1) {}

  __aicore__ inline void load(int64_t first, int64_t count) {
    first_ = static_cast<int32_t>(first);
    if (indices_.bytes == 4) narrow_.load(0, static_cast<Gm<const int32_t>>(indices_.data) + first, count);
    if (indices_.bytes == 8) wide_.load(0, static_cast<Gm<const int64_t>>(indices_.data) + first, count);
  }
  // Call it after the indices have been loaded.
  __aicore__ inline const Ints& convert(int32_t n) const {
    if (indices_.bytes == 0) AscendC::CreateVecIndex(narrow_.tensor(), first_, static_cast<uint32_t>(n));
    if (indices_.bytes == 8) {  // CAST_NONE, the only mode that either chip has for these
      AscendC::Cast(narrow_.tensor(), wide_.tensor(), AscendC::RoundMode::CAST_NONE, static_cast<uint32_t>(n));
    }
    return narrow_.tensor();
  }

 private:
  const IndexArray indices_;
  Local<int32_t> narrow_;
  Local<int64_t> wide_;
  int32_t first_ = 0;
};

// The places of indices in a stretch of an array: up to kWhole items from `first` on.
class Places {
 public:
  __aicore__ inline Places(AscendC::TPipe& pipe, int64_t capacity) : at_(pipe, capacity), inside_(pipe, capacity) {}

  __aicore__ inline void find(const Ints& indices, int64_t first, int64_t size, int32_t n) {
    first_ = first;
    const auto begin = static_cast<int32_t>(first);
    const Ints& at = at_.tensor();
    const Ints& inside = inside_.tensor();
    AscendC::Maxs(at, indices, begin, n);
    AscendC::Mins(at, at, static_cast<int32_t>(smaller(first + kWhole, size) - 1), n);
    AscendC::Sub(inside, indices, at, n);
    to_flags(inside, n);
    AscendC::Muls(inside, inside, -1, n);
    AscendC::Adds(inside, inside, 1, n);
    AscendC::Adds(at, at, -begin, n);
    AscendC::Muls(at, at, int32_t{sizeof(int32_t)}, n);
  }

  __aicore__ inline int64_t first() const { return first_; }
  // In bytes; for an index outside the stretch, of the nearest item.
  __aicore__ inline AscendC::LocalTensor<uint32_t> offsets() const {
    return at_.tensor().template ReinterpretCast<uint32_t>();
  }
  __aicore__ inline const Ints& inside() const { return inside_.tensor(); }

 private:
  Local<int32_t> at_, inside_;
  int64_t first_ = 0;
};

// An array with random access: a stretch of it in the unified buffer, mostly the whole array.
class Gathered {
 public:
  const int64_t size;

  __aicore__ inline Gathered(AscendC::TPipe& pipe, Gm<const int32_t> array, int64_t items)
      : size(items), array_(array), stretch_(pipe, larger<int64_t>(smaller(items, kWhole), 1)) {}

  __aicore__ inline void load(int64_t first = 0) {
    held_ = first;
    stretch_.load(0, array_ + first, smaller(kWhole, size - first));
  }
  __aicore__ inline void gather(const Ints& to, const Places& places, int32_t n) {
    if (held_ != places.first()) {
      order<AscendC::HardEvent::V_MTE2>();
      load(places.first());
      order<AscendC::HardEvent::MTE2_V>();
    }
    AscendC::Gather(to, stretch_.tensor(), places.offsets(), 0, static_cast<uint32_t>(n));
  }

 private:
  const Gm<const int32_t> array_;
  Local<int32_t> stretch_;
  int64_t held_ = 0;
};

}  // namespace ngram_npu::ascendc
