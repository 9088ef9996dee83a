// A kernel with shared memory, which must not compile as a template: the compiler would not keep one copy per block.
#include <cuda_runtime.h>

NGRAM_HEAD __global__ void kernel(int* out) {
  __shared__ int value;
  value = 1;
  *out = value;
}

void call(int* out) { kernel(out); }
