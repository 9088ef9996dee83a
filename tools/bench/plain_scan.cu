// A baseline for the lookup: one block per row, one load per token, and a comparison of each position with the row's
// end. It finds the longest latest match of min_n to max_n tokens, but has neither costs nor options for the draft.
#include <cuda_runtime.h>

#include <cstdint>

constexpr int32_t kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    plain_scan_kernel(const int32_t* rows, int64_t stride, const int32_t* lengths, int32_t min_n, int32_t max_n,
                      int32_t k, int32_t* draft_token_ids, int32_t* num_draft_tokens) {
  __shared__ unsigned long long best;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t length = lengths[blockIdx.x];
  const int32_t* tokens = rows + blockIdx.x * stride;
  if (thread == 0) best = 0;
  __syncthreads();
  for (int32_t end = thread; end < length - 1; end += kThreads) {
    int32_t n = 0;
    while (n < max_n && n <= end && tokens[end - n] == tokens[length - 1 - n]) ++n;
    if (n >= min_n) atomicMax(&best, static_cast<unsigned long long>(n) << 32 | static_cast<uint32_t>(end));
  }
  __syncthreads();
  const int32_t begin = static_cast<int32_t>(best) + 1, available = best == 0 ? 0 : length - begin;
  const int32_t count = k < available ? k : available;
  if (thread < k) draft_token_ids[blockIdx.x * k + thread] = thread < count ? tokens[begin + thread] : -1;
  if (thread == 0) num_draft_tokens[blockIdx.x] = count;
}

extern "C" __attribute__((visibility("default"))) int plain_scan(const int32_t* rows, int64_t stride,
                                                                 const int32_t* lengths, int32_t batch, int32_t min_n,
                                                                 int32_t max_n, int32_t k, int32_t* draft_token_ids,
                                                                 int32_t* num_draft_tokens, void* stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<uint32_t>(batch));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, plain_scan_kernel, rows, stride, lengths, min_n, max_n, k, draft_token_ids,
                            num_draft_tokens);
}
