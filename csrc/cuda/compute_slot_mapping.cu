#include "cuda/slots.cuh"

namespace ngram_npu::cuda {
namespace {

constexpr int32_t kThreads = 256;

template <class Slot>
__global__ void __launch_bounds__(kThreads) compute_slot_mapping_kernel(const ComputeSlotMappingParams p) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= p.num_slots) return;
  write_slot<Slot>(p, request_of(p.query_start_loc, p.batch, n), n, [&] { return p.positions[n]; });
}

}  // namespace
}  // namespace ngram_npu::cuda

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_compute_slot_mapping_(const ComputeSlotMappingParams* params, void* stream) {
  const dim3 grid = cuda::blocks_for(params->num_slots, cuda::kThreads);
  const auto kernel =
      params->slot_bytes == 8 ? cuda::compute_slot_mapping_kernel<int64_t> : cuda::compute_slot_mapping_kernel<int32_t>;
  return cuda::launch(kernel, grid, cuda::kThreads, stream, *params);
}
