// A kernel with shared memory. With NGRAM_KERNEL_PREFIX "template ..." it must not compile (CMakeLists.txt), because
// the compiler would not place the shared memory of a template in the model's linker section.
#include <cuda_runtime.h>

NGRAM_KERNEL_PREFIX __global__ void kernel(int* out) {
  __shared__ int value;
  value = 1;
  *out = value;
}

void call_kernel(int* out) { kernel(out); }
