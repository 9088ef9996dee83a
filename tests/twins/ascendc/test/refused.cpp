// One call per NGRAM_CASE. Calls that the chip does not have must not compile. Without a case, the calls that it has
// must compile.
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
constexpr int n = 64;

#ifndef NGRAM_CASE
void offered(I32 i, U32 u, U16 h, F32 f, LocalTensor<uint8_t> bits, LocalTensor<int64_t> l) {
  AscendC::Add(i.a, i.b, i.c, n);
  AscendC::Muls(i.a, i.b, 2, n);
  AscendC::And(h.a, h.b, h.c, n);
  AscendC::CompareScalar(bits, i.a, 1, CMPMODE::EQ, n);
  AscendC::Gather(u.a, u.b, u.c, 0, n);
  AscendC::Duplicate(u.a, 1u, n);
  AscendC::Cast(i.a, l, RoundMode::CAST_NONE, n);
  AscendC::ReduceMax(f.a, f.b, f.c, n);
  AscendC::ShiftLeft(u.a, u.b, 1u, n);
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
void reduce_int32(I32 i) { AscendC::ReduceMax(i.a, i.b, i.c, n); }
#elif NGRAM_CASE == 4
void compare_uint32(U32 u, LocalTensor<uint8_t> bits) { AscendC::CompareScalar(bits, u.a, 1u, CMPMODE::EQ, n); }
#elif NGRAM_CASE == 5
void add_uint32(U32 u) { AscendC::Add(u.a, u.b, u.c, n); }
#elif NGRAM_CASE == 6
void cast_int32_to_half(LocalTensor<half> g, I32 i) { AscendC::Cast(g, i.a, RoundMode::CAST_NONE, n); }
#elif NGRAM_CASE == 7
void duplicate_uint8(LocalTensor<uint8_t> b) { AscendC::Duplicate(b, uint8_t{1}, n); }
#elif NGRAM_CASE == 8
void add_double(LocalTensor<double> d) { AscendC::Add(d, d, d, n); }
#endif
