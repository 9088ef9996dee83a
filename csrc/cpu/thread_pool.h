// The small thread pool of `_C`, for callers without torch. The first call starts its threads; they sleep between
// calls.
#pragma once

#include "core/common.h"

namespace ngram_npu::cpu {

// An executor over the pool. A call that finds the pool busy runs on its own thread instead of waiting; a process
// forked from one that used the pool starts a new one.
Executor pool_executor();

}  // namespace ngram_npu::cpu
