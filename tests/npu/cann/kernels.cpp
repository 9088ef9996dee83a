// Replaces CANN's build of the kernels: a binary with an entry per kernel, which the runtime launches, or a library
// with a stub per kernel, `aclrtlaunch_<kernel>`. The first launch of an operator runs its CPU kernel with the
// arguments of the launch, so wrong arguments give wrong results.
#include <cstring>

#include "ascendc/plans.h"
#include "stand_in.h"

namespace {

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

template <class Params>
auto remove_executor(Params& params, int) -> decltype(params.executor, void()) {
  params.executor = nullptr;  // valid only in the thread that enqueued the launch
}
template <class Params>
void remove_executor(Params&, long) {}

template <class Params>
uint32_t launch_kernel(Kernel kernel, const char* name, int32_t (*run_cpu_kernel)(const Params*, void*),
                       uint32_t blocks, void* stream, const NgramNpuLaunchArgs& args) {
  if (const uint32_t error = stand_in_record_launch(name, stream); error != 0) return error;
  Params params;
  std::memcpy(&params, args.params, sizeof(params));
  const LaunchPlan expected = plan(params, {kStandInVectorCores, kStandInUbBytes});
  const Launch& first_launch = expected.launches[0];
  if (first_launch.kernel != kernel) return 0;  // the first launch of the plan has run the CPU kernel
  if (first_launch.blocks != blocks) return 1;
  if (expected.workspace_bytes > 0) {
    if (args.workspace == 0) return 1;
    std::memset(reinterpret_cast<void*>(args.workspace), 0xa5, static_cast<size_t>(expected.workspace_bytes));
  }
  remove_executor(params, 0);
  return static_cast<uint32_t>(run_cpu_kernel(&params, nullptr));
}

}  // namespace

static_assert(sizeof(NgramNpuLaunchArgs) == kStandInArgsBytes);

#define STAND_IN_OP(op, Params)          \
  using op##_params = ngram_npu::Params; \
  extern "C" int32_t ngram_npu_cpu_##op(const op##_params* params, void* stream);
NGRAM_NPU_ASCENDC_OPS(STAND_IN_OP)

#define STAND_IN_KERNEL(op, kernel)                                                                                    \
  extern "C" uint32_t kernel(uint32_t blocks, void* stream, const NgramNpuLaunchArgs* args) {                          \
    return launch_kernel<op##_params>(ngram_npu::ascendc::Kernel::kernel, #kernel, ngram_npu_cpu_##op, blocks, stream, \
                                      *args);                                                                          \
  }
// CANN's generated stubs allocate one word on the device per launch. Their library starts CANN when it is opened.
extern "C" int aclrtMalloc(void** memory, size_t bytes, int policy);
extern "C" int aclrtFree(void* memory);
extern "C" const char* aclrtGetSocName();
#ifdef STAND_IN_STUBS
__attribute__((constructor)) static void register_kernels() { aclrtGetSocName(); }
#endif
#define STAND_IN_STUB(op, kernel)                                                                                      \
  extern "C" uint32_t aclrtlaunch_##kernel(uint32_t blocks, void* stream, NgramNpuLaunchArgs* args) {                  \
    void* overflow = nullptr;                                                                                          \
    aclrtMalloc(&overflow, 8, 0);                                                                                      \
    const uint32_t error = launch_kernel<op##_params>(ngram_npu::ascendc::Kernel::kernel, #kernel, ngram_npu_cpu_##op, \
                                                      blocks, stream, *args);                                          \
    aclrtFree(overflow);                                                                                               \
    return error;                                                                                                      \
  }
#include "entries.inc"
