// Compiles the Ascend C call NGRAM_CALL for the chip NGRAM_TWIN_CHIP (ngram_npu_add_call_test in CMakeLists.txt).
#include "kernel_operator.h"

using namespace AscendC;

// The following names are short because NGRAM_CALL contains them.
template <class T>
struct Operands {
  LocalTensor<T> a, b, c;
};
constexpr int n = 64;

void call(Operands<int32_t> i, Operands<uint32_t> u, Operands<uint16_t> h, LocalTensor<uint8_t> bits) { NGRAM_CALL; }
