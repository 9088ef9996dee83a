"""Code that the host twin cannot model does not compile for it."""

from __future__ import annotations

import subprocess

import pytest
from twins import ROOT

INCLUDE = ROOT / "tests" / "twins" / "cuda" / "include"
KERNEL = """
#include <cuda_runtime.h>
namespace {{
{head} __global__ void kernel({type}* out) {{
  __shared__ int held;
  held = 1;
  *out = held;
}}
}}  // namespace
void call(int* out) {{ kernel(out); }}
"""


@pytest.mark.parametrize(
    ("head", "type_", "message"),
    [("", "int", ""), ("template <class T>", "T", "__shared__ in a template is not kept")],
)
def test_shared_memory_of_a_template(head: str, type_: str, message: str) -> None:
    done = subprocess.run(
        ["g++", "-std=c++17", "-fsyntax-only", f"-I{INCLUDE}", "-x", "c++", "-"],
        input=KERNEL.format(head=head, type=type_),
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == (message == "")
    assert message in done.stderr
