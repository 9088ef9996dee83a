#include "cuda/spec_state.cuh"

namespace ngram_npu {

static __device__ void write_item(const ComputeSlotMappingParams& p, int64_t n) {
  cuda::write_slot(p, cuda::request_of(p.query_start_loc, p.batch, n), n, [&] { return p.positions[n]; });
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cuda_compute_slot_mapping_(const ComputeSlotMappingParams* params, void* stream) {
  return cuda::launch_items(*params, params->num_slots, stream);
}

}  // namespace ngram_npu
