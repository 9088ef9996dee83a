// The host twin's counterpart of the device library's header of this name: the part of Ascend C that the kernels use,
// with the open headers' signatures, and strict. docs/design/ascendc-twin.md says what it can and cannot check.
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
