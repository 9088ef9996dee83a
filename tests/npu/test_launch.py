"""Tests the NPU backend with the real torch_npu and stand-ins for CANN: how libraries are loaded,
operators are registered, and kernels are launched, and that the results are correct.

The host twin tests the kernels. Here, the operators' CPU kernels run instead, with the arguments of
the launches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from ops.specs import OPSPECS

from npu.npu_process import (
    BINARY,
    LAUNCH,
    LIBRARIES,
    NEXT_CANN,
    NEXT_TORCH,
    NEXT_TORCH_NPU,
    ROOT,
    Npu,
    make_npu,
)  # fmt: skip
from tools.npu.__main__ import SIZES

pytestmark = pytest.mark.slow  # needs `make test-slow`

KERNEL_OPS = {spec.kernel for spec in OPSPECS.values()}
CHECKS = (ROOT / "tests/npu/npu_checks.py").read_text()


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Npu:
    return make_npu(tmp_path_factory.mktemp("install"))


CALL = """
import torch, torch_npu, ngram_npu
tensors = [torch.tensor(x, dtype=torch.int32).npu() for x in ([2], [1], [0, 3])]
try:
    torch.ops.ngram_npu.prepare_inputs_padded(*tensors)
    torch.npu.synchronize()
except RuntimeError as error:
    print(*str(error).split())
"""


# Functions that list the open libraries of CANN, torch_npu and ngram_npu, and the calls of CANN.
LIST_ACTIVITY = """
import ctypes
def list_libraries():
    names = ["ascendcl", "torch_npu"]
    names += ["ngram_npu_launch", "ngram_npu_kernels"]
    maps = open("/proc/self/maps").read()
    return [name for name in names if f"lib{name}." in maps or f"/{name}." in maps]
def take_calls():
    if "ascendcl" not in list_libraries():
        return []
    function = ctypes.CDLL("libascendcl.so").stand_in_take_calls
    function.restype = ctypes.c_char_p
    return function().decode().splitlines()
"""
IMPORT = f"""
import ngram_npu
from ngram_npu import _library
from ngram_npu.engines.vllm import ascend, plugin
plugin.install()
plugin.install_ascend()
assert _library.has_kernel("ngram_step_", "npu") and not _library.has_kernel("nothing", "npu")
assert _library.backends()["npu"].kernels == {len(KERNEL_OPS)}
"""


def test_import_opens_no_library_of_cann_or_torch_npu(npu: Npu) -> None:
    output = npu.run_code(LIST_ACTIVITY + IMPORT + "print(list_libraries(), take_calls())")
    assert output == "[] []"


def test_import_with_torch_npu_does_not_call_cann(npu: Npu) -> None:
    setup = LIST_ACTIVITY + "import torch, torch_npu\n"
    setup += "assert 'ascendcl' in list_libraries()\ntake_calls()\n"
    output = npu.run_code(setup + IMPORT + "print(list_libraries(), take_calls())")
    assert output == "['ascendcl', 'torch_npu'] []"
    # An operator's call loads the kernels and calls CANN.
    code = setup + CALL + "print(list_libraries(), len(take_calls()) > 0)"
    output = npu.run_code(code).splitlines()[-1]
    assert output == "['ascendcl', 'torch_npu', 'ngram_npu_launch', 'ngram_npu_kernels'] True"


def test_forked_process_loads_kernels_for_its_own_devices(npu: Npu) -> None:
    code = """
import os, sys, torch, torch_npu
take_calls()
{IMPORT}
child = os.fork()
if child == 0:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "3"
    {CALL}
    buffer = ctypes.create_string_buffer(1 << 16)
    ctypes.CDLL("libascendcl.so").stand_in_take_record(buffer, len(buffer))
    print([line for line in buffer.value.decode().splitlines() if line != "copy"], flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(list_libraries(), take_calls())
""".replace("{IMPORT}", IMPORT).replace("{CALL}", CALL.replace("\n", "\n    "))
    output = npu.run_code(LIST_ACTIVITY + code).splitlines()
    assert output == [
        "['load, devices 3', 'ngram_npu_prepare_inputs_padded']",
        "['ascendcl', 'torch_npu'] []",
    ]


def test_all_kernels_are_found_and_registered(npu: Npu) -> None:
    code = """
import json, torch, ngram_npu
from ngram_npu import _library
ops = torch._C._dispatch_get_all_op_names()
ops = sorted(name.removeprefix("ngram_npu::") for name in ops if name.startswith("ngram_npu::"))
print(json.dumps({
    "doctor": ngram_npu.doctor().to_dict()["backends"]["npu"],
    "registered": [op for op in ops
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"ngram_npu::{op}", "PrivateUse1")],
    "kernels": [op for op in ops if _library.has_kernel(op, "npu")],
}))
"""
    state = json.loads(npu.run_code(code).splitlines()[-1])
    assert state["doctor"] == {"name": "npu", "kernels": len(KERNEL_OPS), "reason": ""}
    assert set(state["registered"]) == set(OPSPECS)
    assert set(state["kernels"]) == set(OPSPECS)


def test_npu_checks_pass_in_a_process_with_an_npu(npu: Npu) -> None:
    run_npu_checks(npu)


def run_npu_checks(npu: Npu, **variables: str) -> None:
    code = "import torch, torch_npu, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ("-q", "-p", "no:cacheprovider", "tests/npu/npu_checks.py")
    result = npu.run("-c", code, *arguments, **variables)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    summary = re.search(r"\n(\d+) passed(, \d+ warnings?)? in", result.stdout)
    assert summary is not None, result.stdout
    num_tests = CHECKS.count("\ndef test_") - 1 + len(OPSPECS)  # one test is parametrized
    assert int(summary[1]) == num_tests


@pytest.mark.prove
def test_npu_checks_pass_with_the_next_torch_and_torch_npu(npu: Npu, tmp_path: Path) -> None:
    """The launcher is compiled with the headers of the next torch and torch_npu, and then runs with
    both. The kernels and the operators are those of the other tests."""
    torch, torch_npu = NEXT_TORCH / "torch", NEXT_TORCH_NPU / "torch_npu"
    folders = [torch_npu / "include", torch_npu / "include/third_party/acl/inc"]
    folders += [torch / "include", torch / "include/torch/csrc/api/include"]
    includes = [f"-I{ROOT / 'csrc'}", *(f"-isystem{folder}" for folder in folders)]
    source = ROOT / "csrc/ascendc/launch.cpp"
    libraries = [torch_npu / "lib/libtorch_npu.so", torch / "lib/libc10.so"]
    libraries += [torch / "lib/libtorch_cpu.so", f"-L{NEXT_CANN}", "-lascendcl", "-ldl"]
    path = _change_libraries(npu, tmp_path, LAUNCH)
    output = tmp_path / "install" / "ngram_npu" / LAUNCH
    link = ["-shared", "-Wl,--no-undefined", "-Wl,--allow-shlib-undefined", "-o", output]
    result = _compile("-std=c++20", "-O0", *includes, source, *libraries, *link)
    assert result.returncode == 0, result.stderr
    package = path.split(os.pathsep)[0]
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (package, NEXT_TORCH, NEXT_TORCH_NPU))),
        "LD_LIBRARY_PATH": str(NEXT_CANN),
    }
    run_npu_checks(npu, **variables)


def _compile(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-fPIC", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_npu_tool_runs_doctor_parity_and_bench(npu: Npu, tmp_path: Path) -> None:
    """Runs all stages except the build."""
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}  # the default
    stages = ("doctor", "parity", "bench")
    result = npu.run("-m", "tools.npu", "--out", tmp_path, "--only", *stages, **variables)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    report = json.loads((tmp_path / "npu-run.json").read_text())
    doctor, parity, _ = report["stages"]
    assert f"backend npu          {len(KERNEL_OPS)} kernels;" in doctor["output"]
    assert report["bench"]["machine"]["npu"]["name"] == "Ascend910B3"
    assert re.search(rf"\n{len(OPSPECS)} passed", parity["output"])
    assert [result["size"] for result in report["bench"]["results"]] == list(SIZES)
    for result in report["bench"]["results"]:
        assert result["where"] == "npu"
        assert result["scan"] > 0


def test_failed_launch_or_unknown_core_count_raises(npu: Npu) -> None:
    assert "ngram_npu_prepare_inputs_padded" in npu.run_code(CALL, STAND_IN_FAILS="1")
    output = npu.run_code(CALL, STAND_IN_CORES="0").splitlines()[-1]
    assert output == (
        "prepare_inputs_padded: the kernel failed: launch failed (status 2): the number of vector "
        "cores of NPU 0 is unknown: aclrtGetDeviceInfo(ACL_DEV_ATTR_VECTOR_CORE_NUM) returned 0 "
        "and 0 cores"
    )


def test_self_test_reports_failed_launches(npu: Npu) -> None:
    command = ("-m", "ngram_npu_cli", "doctor", "--self-test")
    assert npu.run(*command).returncode == 0
    result = npu.run(*command, STAND_IN_FAILS="1")
    assert result.returncode == 1, result.stderr
    assert "prepare_inputs, 2 calls: scalar equal" in result.stdout
    assert result.stdout.count("npu FAILED") == len(OPSPECS)
    assert "PROBLEM              self-test: prepare_inputs on npu: call 1: " in result.stdout


def _change_libraries(npu: Npu, folder: Path, *names: str, content: bytes | None = None) -> str:
    """Copies the package without the named libraries, or with `content` as their content.

    Returns:
        The PYTHONPATH of the copy.
    """
    install_folder = folder / "install"
    shutil.copytree(npu.folder, install_folder)
    for name in names:
        (install_folder / "ngram_npu" / name).unlink()
        if content is not None:
            (install_folder / "ngram_npu" / name).write_bytes(content)
    return npu.environment["PYTHONPATH"].replace(str(npu.folder), str(install_folder))


@pytest.mark.parametrize("content", [None, b"not a binary"])
def test_missing_or_invalid_binary_raises(npu: Npu, tmp_path: Path, content: bytes | None) -> None:
    path = _change_libraries(npu, tmp_path, BINARY, content=content)
    output = npu.run_code(CALL, PYTHONPATH=path)
    assert output.startswith("prepare_inputs_padded: the kernel failed: launch failed (status 2): ")
    assert "aclrtBinaryLoadFromFile returned 100003 for" in output
    assert f"{BINARY}; was it built for this Ascend910B3?" in output


# Without the NPU backend, the operators work on the CPU, and the doctor reports the reason.

CALL_ON_CPU = """
import torch, ngram_npu
tensors = [torch.tensor(x, dtype=torch.int32) for x in ([2], [1], [0, 3])]
assert torch.ops.ngram_npu.prepare_inputs_padded(*tensors)[1].tolist() == [2]
print("\\n".join(line for line in str(ngram_npu.doctor()).splitlines() if "backend npu" in line))
"""


def test_doctor_reports_missing_libraries(npu: Npu, tmp_path: Path) -> None:
    assert "torch_npu is not installed" in npu.run_code(CALL_ON_CPU, PYTHONPATH=str(npu.folder))
    output = npu.run_code(CALL_ON_CPU, LD_LIBRARY_PATH="")
    assert "torch_npu does not import: lib" in output
    path = _change_libraries(npu, tmp_path, *LIBRARIES)
    assert "it was made without CANN" in npu.run_code(CALL_ON_CPU, PYTHONPATH=path)


def test_doctor_reports_invalid_library(npu: Npu, tmp_path: Path) -> None:
    path = _change_libraries(npu, tmp_path, LAUNCH, content=b"not a library")
    assert LAUNCH in npu.run_code(CALL_ON_CPU, PYTHONPATH=path)
    output = npu.run_code(CALL, PYTHONPATH=path)
    assert output.startswith("prepare_inputs_padded: failed to load the kernels for this device:")
    assert LAUNCH in output
