// The host twin's counterpart of the device library's header of this name: what of Ascend C the kernels use, written
// against the open headers' signatures, and strict. docs/design/ascendc-twin.md says what it checks and what it cannot.
#pragma once

#include "copy.h"
#include "pipe.h"
#include "scalar.h"
#include "tensor.h"
#include "vector.h"

#define __global__
#define __aicore__
#define __gm__

constexpr int KERNEL_TYPE_AIV_ONLY = 0;
#define KERNEL_TASK_TYPE_DEFAULT(value) static_assert(value == KERNEL_TYPE_AIV_ONLY, "the twin has vector cores only")
