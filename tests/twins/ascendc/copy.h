// DataCopyPad: MTE2 from global memory to UB, MTE3 back. The kernels copy single blocks and ask for no padding.
#pragma once

#include <algorithm>

#include "pipe.h"

namespace AscendC {

struct DataCopyExtParams {
  using Stride = std::conditional_t<kChip.arch == 3510, int64_t, uint32_t>;
  DataCopyExtParams(const uint16_t count, const uint32_t len, const Stride srcStrideIn, const Stride dstStrideIn,
                    const uint32_t)
      : blockCount(count), blockLen(len), srcStride(srcStrideIn), dstStride(dstStrideIn) {}
  uint16_t blockCount;
  uint32_t blockLen;
  Stride srcStride;
  Stride dstStride;
};

template <class T>
struct DataCopyPadExtParams {};

}  // namespace AscendC

namespace ngram_npu::twin {

inline uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

inline uint64_t copied_bytes(Core& core, const Place& ub, const AscendC::DataCopyExtParams& p, uint64_t unit) {
  NGRAM_TWIN_CHECK(core.live(ub, "DataCopyPad").copies,
                   "block %d: DataCopyPad: a TBuf at VECCALC, which this chip does not document: VECIN or VECOUT",
                   core.block());
  NGRAM_TWIN_CHECK(p.blockCount == 1 && p.srcStride == 0 && p.dstStride == 0,
                   "block %d: DataCopyPad: the twin has single blocks, not %u or strides", core.block(), p.blockCount);
  NGRAM_TWIN_CHECK(p.blockLen >= 1 && p.blockLen <= kMaxPadBlockBytes,
                   "block %d: DataCopyPad: blockLen %u, the limit is %u", core.block(), p.blockLen, kMaxPadBlockBytes);
  NGRAM_TWIN_CHECK(p.blockLen % unit == 0,
                   "block %d: DataCopyPad: blockLen %u is no multiple of the element's %u bytes", core.block(),
                   p.blockLen, static_cast<unsigned>(unit));
  return p.blockLen;
}

}  // namespace ngram_npu::twin

namespace AscendC {

// The filling of the last 32 bytes is poison.
template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& dataCopyParams,
                 const DataCopyPadExtParams<T>&) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::copied_bytes(core, dst.place(), dataCopyParams, sizeof(T));
  const uint64_t whole = ngram_npu::twin::round_up(bytes, ngram_npu::twin::kBlockBytes);
  core.issue(ngram_npu::twin::kMte2, "DataCopyPad");
  core.gm_copy(src.address(), bytes, false);
  uint8_t* to = core.write(dst.place(), whole);
  std::memcpy(to, reinterpret_cast<const void*>(src.address()), bytes);
  std::memset(core.shadow(to), 0, bytes);
  std::memset(core.shadow(to) + bytes, 0xFF, whole - bytes);
  core.copy_cost(bytes, false);
}
template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& dataCopyParams) {
  Core& core = Core::current();
  const uint64_t bytes = ngram_npu::twin::copied_bytes(core, src.place(), dataCopyParams, sizeof(T));
  core.issue(ngram_npu::twin::kMte3, "DataCopyPad");
  const uint8_t* from = core.read(src.place(), bytes);
  const uint8_t* shadow = core.shadow(from);
  if (std::any_of(shadow, shadow + bytes, [](uint8_t s) { return s != 0; })) core.poisoned();
  core.gm_copy(dst.address(), bytes, true);
  std::memcpy(reinterpret_cast<void*>(dst.address()), from, bytes);
  core.copy_cost(bytes, true);
}

}  // namespace AscendC
