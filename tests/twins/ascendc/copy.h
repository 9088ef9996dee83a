// DataCopy and DataCopyPad: MTE2 from global memory to UB, MTE3 back, V within UB.
#pragma once

#include <algorithm>

#include "pipe.h"

namespace AscendC {

struct DataCopyParams {
  DataCopyParams() = default;
  DataCopyParams(const uint16_t count, const uint16_t len, const uint16_t srcStrideIn, const uint16_t dstStrideIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn) {}
  uint16_t blockCount = 1;
  uint16_t blockLen = 0;
  uint16_t srcStride = 0;
  uint16_t dstStride = 0;
};

struct DataCopyPadParams {
  DataCopyPadParams() = default;
  DataCopyPadParams(const bool isPadValue, const uint8_t leftPadValue, const uint8_t rightPadValue,
                    const uint64_t padValue)
      : isPad(isPadValue), leftPadding(leftPadValue), rightPadding(rightPadValue), paddingValue(padValue) {}
  bool isPad = false;
  uint8_t leftPadding = 0;
  uint8_t rightPadding = 0;
  uint64_t paddingValue = 0;
};

struct DataCopyExtParams {
  using Stride = std::conditional_t<kChip.arch == 3510, int64_t, uint32_t>;
  DataCopyExtParams() = default;
  DataCopyExtParams(const uint16_t count, const uint32_t len, const Stride srcStrideIn, const Stride dstStrideIn,
                    const uint32_t rsvIn)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn), rsv(rsvIn) {}
  uint16_t blockCount = 1;
  uint32_t blockLen = 0;
  Stride srcStride = 0;
  Stride dstStride = 0;
  uint32_t rsv = 0;
};

template <class T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(const bool isPadValue, const uint8_t leftPadValue, const uint8_t rightPadValue, T padValue)
      : isPad(isPadValue), leftPadding(leftPadValue), rightPadding(rightPadValue), paddingValue(padValue) {}
  bool isPad = false;
  uint8_t leftPadding = 0;
  uint8_t rightPadding = 0;
  T paddingValue = 0;
};

}  // namespace AscendC

namespace ngram_npu::twin {

// Blocks of `bytes`, `gm_pitch` apart in global memory and `ub_pitch` in UB, with `left` and `right` bytes around each
// there. The filling of a block's last 32 bytes is poison, or the padding that was asked for.
struct Blocks {
  uint64_t count;
  uint64_t bytes;
  int64_t gm_pitch;
  int64_t ub_pitch;
  uint64_t left = 0;
  uint64_t right = 0;
};

inline uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

inline Place at_byte(Place place, uint64_t offset) {
  place.address += static_cast<uint32_t>(offset);
  return place;
}

// The pad's bytes: `unit` bytes, repeated; null: none.
inline void copy_in(Core& core, const Place& dst, uintptr_t src, const Blocks& blocks, const void* pad, size_t unit,
                    const char* what) {
  core.issue(kMte2, what);
  const uint64_t whole = round_up(blocks.left + blocks.bytes + blocks.right, kBlockBytes);
  for (uint64_t i = 0; i < blocks.count; ++i) {
    const uintptr_t from = src + static_cast<uint64_t>(static_cast<int64_t>(i) * blocks.gm_pitch);
    core.gm_copy(from, blocks.bytes, false);
    uint8_t* to = core.write(at_byte(dst, static_cast<uint64_t>(static_cast<int64_t>(i) * blocks.ub_pitch)), whole);
    std::memset(core.shadow(to), 0xFF, whole);
    if (pad != nullptr) {
      const uint64_t end = blocks.left + blocks.bytes + blocks.right;
      for (uint64_t b = 0; b < end; b += unit)
        if (b < blocks.left || b >= blocks.left + blocks.bytes) std::memcpy(to + b, pad, unit);
      std::memset(core.shadow(to), 0, end);
    }
    std::memcpy(to + blocks.left, reinterpret_cast<const void*>(from), blocks.bytes);
    std::memset(core.shadow(to) + blocks.left, 0, blocks.bytes);
  }
  core.copy_cost(blocks.count * blocks.bytes, false);
}

inline void copy_out(Core& core, uintptr_t dst, const Place& src, const Blocks& blocks, const char* what) {
  core.issue(kMte3, what);
  for (uint64_t i = 0; i < blocks.count; ++i) {
    const uintptr_t to = dst + static_cast<uint64_t>(static_cast<int64_t>(i) * blocks.gm_pitch);
    const uint8_t* from =
        core.read(at_byte(src, static_cast<uint64_t>(static_cast<int64_t>(i) * blocks.ub_pitch)), blocks.bytes);
    const uint8_t* shadow = core.shadow(from);
    if (std::any_of(shadow, shadow + blocks.bytes, [](uint8_t s) { return s != 0; })) core.poisoned();
    core.gm_copy(to, blocks.bytes, true);
    std::memcpy(reinterpret_cast<void*>(to), from, blocks.bytes);
  }
  core.copy_cost(blocks.count * blocks.bytes, true);
}

template <class Params>
Blocks padded_blocks(Core& core, const Place& ub, const Params& p, uint64_t unit, bool to_gm) {
  static_assert(kChip.copies_with_pad, "this chip has no DataCopyPad");
  NGRAM_TWIN_CHECK(core.live(ub, "DataCopyPad").copies,
                   "block %d: DataCopyPad: a TBuf at VECCALC, which this chip does not document: VECIN or VECOUT",
                   core.block());
  NGRAM_TWIN_CHECK(p.blockCount >= 1 && p.blockCount <= kMaxBlockCount,
                   "block %d: DataCopyPad: blockCount %u, the limit is %u", core.block(), p.blockCount, kMaxBlockCount);
  NGRAM_TWIN_CHECK(p.blockLen >= 1 && p.blockLen <= kMaxPadBlockBytes,
                   "block %d: DataCopyPad: blockLen %u, the limit is %u", core.block(),
                   static_cast<unsigned>(p.blockLen), kMaxPadBlockBytes);
  NGRAM_TWIN_CHECK(p.blockLen % unit == 0,
                   "block %d: DataCopyPad: blockLen %u is no multiple of the element's %u bytes", core.block(),
                   static_cast<unsigned>(p.blockLen), static_cast<unsigned>(unit));
  const int64_t bytes = p.blockLen;
  const int64_t gm_gap = static_cast<int64_t>(to_gm ? p.dstStride : p.srcStride);                // in bytes
  const int64_t ub_gap = static_cast<int64_t>(to_gm ? p.srcStride : p.dstStride) * kBlockBytes;  // in blocks of 32
  return {p.blockCount, static_cast<uint64_t>(bytes), bytes + gm_gap,
          static_cast<int64_t>(round_up(static_cast<uint64_t>(bytes), kBlockBytes)) + ub_gap};
}

template <class T, class Params, class Pad>
void copy_in_padded(const AscendC::LocalTensor<T>& dst, const AscendC::GlobalTensor<T>& src, const Params& params,
                    const Pad& pad) {
  Core& core = Core::current();
  Blocks blocks = padded_blocks(core, dst.place(), params, sizeof(T), false);
  T value{};
  if (pad.isPad) {
    blocks.left = pad.leftPadding * sizeof(T);
    blocks.right = pad.rightPadding * sizeof(T);
    NGRAM_TWIN_CHECK(blocks.left <= kBlockBytes && blocks.right <= kBlockBytes,
                     "block %d: DataCopyPad: padding of more than 32 bytes", core.block());
    blocks.ub_pitch += static_cast<int64_t>(round_up(blocks.left + blocks.bytes + blocks.right, kBlockBytes) -
                                            round_up(blocks.bytes, kBlockBytes));
    std::memcpy(&value, &pad.paddingValue, sizeof(T));
  }
  copy_in(core, dst.place(), src.address(), blocks, pad.isPad ? &value : nullptr, sizeof(T), "DataCopyPad");
}

inline Blocks whole_blocks(const Core& core, uint64_t bytes) {
  NGRAM_TWIN_CHECK(bytes >= kBlockBytes && bytes % kBlockBytes == 0,
                   "block %d: DataCopy of %llu bytes, which is no multiple of 32", core.block(),
                   static_cast<unsigned long long>(bytes));
  return {1, bytes, 0, 0};
}

inline Blocks whole_blocks(const Core& core, const AscendC::DataCopyParams& p, bool to_gm) {
  NGRAM_TWIN_CHECK(p.blockCount >= 1 && p.blockCount <= kMaxBlockCount && p.blockLen >= 1,
                   "block %d: DataCopy: blockCount %u (limit %u), blockLen %u", core.block(), p.blockCount,
                   kMaxBlockCount, p.blockLen);
  const int64_t bytes = int64_t{p.blockLen} * kBlockBytes;
  return {p.blockCount, static_cast<uint64_t>(bytes), bytes + int64_t{to_gm ? p.dstStride : p.srcStride} * kBlockBytes,
          bytes + int64_t{to_gm ? p.srcStride : p.dstStride} * kBlockBytes};
}

}  // namespace ngram_npu::twin

namespace AscendC {

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const uint32_t count) {
  Core& core = Core::current();
  ngram_npu::twin::copy_in(core, dst.place(), src.address(),
                           ngram_npu::twin::whole_blocks(core, uint64_t{count} * sizeof(T)), nullptr, 1, "DataCopy");
}
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& repeatParams) {
  Core& core = Core::current();
  ngram_npu::twin::copy_in(core, dst.place(), src.address(), ngram_npu::twin::whole_blocks(core, repeatParams, false),
                           nullptr, 1, "DataCopy");
}
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  Core& core = Core::current();
  ngram_npu::twin::copy_out(core, dst.address(), src.place(),
                            ngram_npu::twin::whole_blocks(core, uint64_t{count} * sizeof(T)), "DataCopy");
}
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& repeatParams) {
  Core& core = Core::current();
  ngram_npu::twin::copy_out(core, dst.address(), src.place(), ngram_npu::twin::whole_blocks(core, repeatParams, true),
                            "DataCopy");
}
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, const uint32_t count) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::whole_blocks(core, uint64_t{count} * sizeof(T)).bytes;
  core.issue(ngram_npu::twin::kV, "DataCopy");
  const uint8_t* from = core.read(src.place(), bytes);
  uint8_t* to = core.write(dst.place(), bytes);
  std::memmove(core.shadow(to), core.shadow(from), bytes);
  std::memmove(to, from, bytes);
  core.vector_cost(bytes);
}

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 const DataCopyPadExtParams<T>& padParams) {
  ngram_npu::twin::copy_in_padded(dst, src, dataCopyParams, padParams);
}
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& dataCopyParams,
                 const DataCopyPadParams& padParams) {
  ngram_npu::twin::copy_in_padded(dst, src, dataCopyParams, padParams);
}
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams) {
  Core& core = Core::current();
  ngram_npu::twin::copy_out(core, dst.address(), src.place(),
                            ngram_npu::twin::padded_blocks(core, src.place(), dataCopyParams, sizeof(T), true),
                            "DataCopyPad");
}
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& dataCopyParams) {
  Core& core = Core::current();
  ngram_npu::twin::copy_out(core, dst.address(), src.place(),
                            ngram_npu::twin::padded_blocks(core, src.place(), dataCopyParams, sizeof(T), true),
                            "DataCopyPad");
}

}  // namespace AscendC
