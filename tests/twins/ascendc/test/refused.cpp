// One call per NGRAM_CASE. Calls that the chip lacks must not compile; without a case, the calls it has must.
#include "kernel_operator.h"

using AscendC::CMPMODE;
using AscendC::LocalTensor;
using AscendC::RoundMode;

template <class T>
struct On {
  LocalTensor<T> a, b, c;
};
using I32 = On<int32_t>;
using U32 = On<uint32_t>;
using U16 = On<uint16_t>;
using F32 = On<float>;
using F16 = On<half>;
constexpr int n = 64;

#ifndef NGRAM_CASE
void offered(I32 i, U32 u, U16 h, F32 f, F16 g, LocalTensor<uint8_t> bits, LocalTensor<int64_t> l) {
  AscendC::Add(i.a, i.b, i.c, n);
  AscendC::Muls(i.a, i.b, 2, n);
  AscendC::And(h.a, h.b, h.c, n);
  AscendC::Not(h.a, h.b, n);
  AscendC::Compare(bits, f.a, f.b, CMPMODE::LT, n);
  AscendC::CompareScalar(bits, g.a, half(1), CMPMODE::EQ, n);
  AscendC::Gather(u.a, u.b, u.c, 0, n);
  AscendC::Duplicate(u.a, 1u, n);
  AscendC::Cast(f.a, i.a, RoundMode::CAST_NONE, n);
  AscendC::ReduceMax(f.a, f.b, f.c, n, true);
#if NGRAM_TWIN_CHIP != 2002
  AscendC::CompareScalar(bits, i.a, 1, CMPMODE::EQ, n);
  AscendC::ShiftLeft(u.a, u.b, 1u, n);
  AscendC::Cast(l, i.a, RoundMode::CAST_NONE, n);
#endif
#if NGRAM_TWIN_CHIP == 3510
  AscendC::And(i.a, i.b, i.c, n);
  AscendC::ReduceMax(i.a, i.b, i.c, n);
#endif
}
#elif NGRAM_CASE == 1
void and_int32(I32 i) { AscendC::And(i.a, i.b, i.c, n); }
#elif NGRAM_CASE == 2
void or_uint32(U32 u) { AscendC::Or(u.a, u.b, u.c, n); }
#elif NGRAM_CASE == 3
void not_int32(I32 i) { AscendC::Not(i.a, i.b, n); }
#elif NGRAM_CASE == 4
void reduce_int32(I32 i) { AscendC::ReduceMax(i.a, i.b, i.c, n); }
#elif NGRAM_CASE == 5
void compare_uint32(U32 u, LocalTensor<uint8_t> bits) { AscendC::Compare(bits, u.a, u.b, CMPMODE::EQ, n); }
#elif NGRAM_CASE == 6
void add_uint32(U32 u) { AscendC::Add(u.a, u.b, u.c, n); }
#elif NGRAM_CASE == 7
void cast_int32_to_half(F16 g, I32 i) { AscendC::Cast(g.a, i.a, RoundMode::CAST_NONE, n); }
#elif NGRAM_CASE == 8
void duplicate_uint8(LocalTensor<uint8_t> b) { AscendC::Duplicate(b, uint8_t{1}, n); }
#elif NGRAM_CASE == 9
void compare_int32(I32 i, LocalTensor<uint8_t> bits) { AscendC::CompareScalar(bits, i.a, 1, CMPMODE::EQ, n); }
#elif NGRAM_CASE == 10
void shift(U32 u) { AscendC::ShiftLeft(u.a, u.b, 1u, n); }
#elif NGRAM_CASE == 11
void copy_with_pad(LocalTensor<int32_t> l, AscendC::GlobalTensor<int32_t> g) {
  AscendC::DataCopyPad(l, g, AscendC::DataCopyExtParams(1, 4, 0, 0, 0), AscendC::DataCopyPadExtParams<int32_t>());
}
#elif NGRAM_CASE == 12
void add_bool(LocalTensor<double> d) { AscendC::Add(d, d, d, n); }
#endif
