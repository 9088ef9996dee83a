// Kernels compiled to report their accesses: correct ones, and others that are each wrong in one way.
#pragma once

#include <cuda_runtime.h>

namespace twin {

enum class Order { kNone, kBarrier, kSyncwarp };
__global__ void neighbour(int* out, int* staging, Order order);  // each thread reads what the next one wrote, to out
__global__ void neighbour_in_shared_memory(int* out, Order order);
__global__ void overwrites_what_others_read(int* at, int* out, Order order);
__global__ void shuffle_is_no_barrier(int* staging);

// The last block reads what all wrote. Each flag that is false leaves out one thing.
struct LastBlock {
  bool barrier = true, fence_before = true, fence_after = true, barrier_after = true;
};
__global__ void last_block_reads(int* from_all, unsigned* arrived, int* out, LastBlock with);
__global__ void last_block_acquires(int* from_all, unsigned* arrived, int* out, int order, int scope);

__global__ void same_word_twice(int* out);        // two threads, both write
__global__ void bytes_of_one_word(uint8_t* out);  // two threads, different bytes
__global__ void atomic_and_plain(unsigned* out);  // a plain read of what others change atomically
__global__ void atomic_and_volatile(unsigned* out, unsigned* seen);
__global__ void plain_reads(int* at, int* differed);  // of 32 items, which the other block writes meanwhile
__global__ void volatile_read_twice(unsigned* at, unsigned* differed);  // while the other block changes it
// Two blocks: one writes an item, one reads an item as constant.
__global__ void constant_and_written(int* at, int written, int read, int* out);

__global__ void reads_unwritten_shared_memory(int* out);
__global__ void reads_row(const int* at, int index, int* out);
__global__ void writes_row(int* at, int index);
__global__ void loads_vector(const char* at, int4* out);
__global__ void array_of_three(int index, int* out);
__global__ void adds(int a, int b, int* out);
__global__ void shifts(int by, int* out);

}  // namespace twin
