// The instruction set of the vector kernels: the widest of the machine, unless a caller or the environment variable
// NGRAM_NPU_INSTRUCTION_SET selects a narrower one, as the tests do.
#pragma once

#include "core/common.h"

namespace ngram_npu::cpu {

enum class InstructionSet : int32_t { kScalar, kAvx2, kAvx512, kNeon };

InstructionSet instruction_set();

}  // namespace ngram_npu::cpu

// The name of the one in use: "scalar", "avx2", "avx512", "neon".
NGRAM_NPU_EXPORT const char* ngram_npu_cpu_instruction_set();
// Takes a name above, or "auto". kInvalidParams if the machine lacks it; nothing changes then.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_set_instruction_set(const char* name);
