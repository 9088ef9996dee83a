"""Tests which faults of a kernel tools/npu/headers.py finds, and which errors it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.npu.headers import ROOT, compile_kernel, find_clang, find_problems, write_stand_ins

DEVKIT_HEADER = """
#pragma once
namespace AscendC {
template <class T> struct GlobalTensor {
  __aicore__ void SetGlobalBuffer(__gm__ T* buffer);
};
template <class T> struct LocalTensor {
  __aicore__ T GetValue(int i) const { return ((__ubuf__ T*)address)[i]; }
  unsigned long address;
};
template <class T> __aicore__ void Duplicate(const LocalTensor<T>& tensor) {
  static_assert(sizeof(T) == 4);
  vector_dup((__ubuf__ T*)tensor.address);  // an intrinsic, which is not declared
}
}
"""
KERNEL = """
#include "core/common.h"
#include "kernel_operator.h"
namespace ngram_npu {
inline int32_t host_helper() { return 0; }
__aicore__ inline int32_t add_one(const int32_t& x) { return x + 1; }
}
extern "C" __global__ __aicore__ void kernel(ngram_npu::Gm<int32_t> data) {
  using namespace ngram_npu;
  AscendC::LocalTensor<int32_t> local{0};
  AscendC::GlobalTensor<int32_t> global;
  global.SetGlobalBuffer(data);
  AscendC::Duplicate(local);
  const int32_t value = data[0] + local.GetValue(0);
  FAULT
}
"""
FAULTS = {
    "none": "(void)value;",
    "plain pointer to global memory": "int32_t* pointer = data;",
    "reference to a value in global memory": "add_one(data[1]);",
    "call of a host function": "host_helper();",
    "cast between address spaces": "auto ub = static_cast<__ubuf__ int32_t*>(data);",
    "method that does not exist": "local.GetValues(0);",
    "exception": "if (value < 0) throw value;",
    "type that a template rejects": "AscendC::Duplicate(AscendC::LocalTensor<int64_t>{0});",
}


@pytest.mark.skipif(find_clang() is None, reason="clang++ 15 or later is not installed")
@pytest.mark.parametrize("fault", FAULTS)
def test_header_check_finds_fault_of_kernel(tmp_path: Path, fault: str) -> None:
    devkit, sources = tmp_path / "devkit", tmp_path / "sources"
    for folder in (devkit / "include", sources):
        folder.mkdir(parents=True)
    (devkit / "include" / "kernel_operator.h").write_text(DEVKIT_HEADER)
    kernel = sources / "kernel.cpp"
    kernel.write_text(KERNEL.replace("FAULT", FAULTS[fault]))
    write_stand_ins(devkit, tmp_path)
    output = compile_kernel(kernel, tmp_path, [devkit / "include", ROOT / "csrc"], 2201)
    assert "use of undeclared identifier 'vector_dup'" in output
    problems = find_problems(output, str(sources), with_templates=True)
    assert len(problems) == (0 if fault == "none" else 1), output
    num_without_templates = len(find_problems(output, str(sources), with_templates=False))
    assert num_without_templates == (0 if "template" in fault else len(problems))
