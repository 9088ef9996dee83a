#include "watched_kernels.h"

namespace twin {
namespace {

void wait(Order order) {
  if (order == Order::kBarrier) __syncthreads();
  if (order == Order::kSyncwarp) __syncwarp();
}

}  // namespace

void neighbour(int* out, int* staging, Order order) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  staging[i] = static_cast<int>(i);
  wait(order);
  out[i] = staging[blockIdx.x * blockDim.x + (threadIdx.x + 1) % blockDim.x];
}

void neighbour_in_shared_memory(int* out, Order order) {
  __shared__ int staging[64];
  staging[threadIdx.x] = 1;
  wait(order);
  out[blockIdx.x * blockDim.x + threadIdx.x] = staging[(threadIdx.x + 1) % blockDim.x];
}

void overwrites_what_others_read(int* at, int* out, Order order) {
  out[threadIdx.x] = *at;
  wait(order);
  if (threadIdx.x == 0) *at = 1;
}

void shuffle_is_no_barrier(int* staging) {
  staging[threadIdx.x] = 1;
  const int source = __shfl_up_sync(~0u, static_cast<int>(threadIdx.x), 1);
  staging[32 + threadIdx.x] = staging[source];
}

void last_block_reads(int* from_all, unsigned* arrived, int* out, LastBlock with) {
  __shared__ bool last;
  from_all[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  if (with.barrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (with.fence_before) __threadfence();
    last = atomicAdd(arrived, 1u) % gridDim.x == gridDim.x - 1;
    if (with.fence_after) __threadfence();
  }
  if (with.barrier_after) {
    __syncthreads();
    if (!last) return;
  } else if (threadIdx.x != 0 || !last) {
    return;
  }
  int sum = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x * blockDim.x; i += blockDim.x) sum += from_all[i];
  out[threadIdx.x] = sum;
}

void last_block_acquires(int* from_all, unsigned* arrived, int* out, int order, int scope) {
  __shared__ bool last;
  from_all[blockIdx.x * blockDim.x + threadIdx.x] = 1;
  __syncthreads();
  if (threadIdx.x == 0) last = __nv_atomic_fetch_add(arrived, 1u, order, scope) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  out[threadIdx.x] = from_all[threadIdx.x] + from_all[(gridDim.x - 1) * blockDim.x + threadIdx.x];
  if (threadIdx.x == 0) *arrived = 0;
}

void same_word_twice(int* out) { *out = 1; }

void bytes_of_one_word(uint8_t* out) { out[threadIdx.x] = 1; }

void atomic_and_plain(unsigned* out) {
  if (threadIdx.x == 0) {
    out[1] = out[0];
  } else {
    atomicAdd(out, 1u);
  }
}

void atomic_and_volatile(unsigned* out, unsigned* seen) {
  if (threadIdx.x == 0) {
    *seen = *static_cast<volatile unsigned*>(out);
  } else {
    atomicAdd(out, 1u);
  }
}

void volatile_read_twice(unsigned* at, unsigned* differed) {
  const volatile unsigned* shown = at;
  if (blockIdx.x == 0) {
    atomicAdd(at, 1u);
  } else if (*shown != *shown) {
    atomicAdd(differed, 1u);
  }
}

void plain_reads(int* at, int* differed) {
  int seen = 0;
  for (int i = 0; i < 32; ++i) {
    if (blockIdx.x == 0) {
      at[i] = 1;
    } else {
      seen += at[i];
    }
  }
  if (seen % 32 != 0) *differed = 1;
}

void constant_and_written(int* at, int written, int read, int* out) {
  if (blockIdx.x == 0) {
    at[written] = 1;
  } else {
    *out = __ldg(at + read);
  }
}

void reads_unwritten_shared_memory(int* out) {
  __shared__ int mine[64];
  if (threadIdx.x != 7) mine[threadIdx.x] = 1;
  out[threadIdx.x] = mine[threadIdx.x];
}

void reads_row(const int* at, int index, int* out) { *out = at[index]; }
void writes_row(int* at, int index) { at[index] = 1; }
void loads_vector(const char* at, int4* out) { *out = *reinterpret_cast<const int4*>(at); }

void array_of_three(int index, int* out) {
  __shared__ int three[3];
  three[index] = index;
  *out = three[index];
}

void adds(int a, int b, int* out) { *out = a + b; }
void shifts(int by, int* out) { *out = 1 << by; }

}  // namespace twin
