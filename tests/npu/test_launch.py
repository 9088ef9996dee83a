"""The NPU backend with the real torch_npu and stand-ins for CANN: loading, registration, launches
and their order, and results.

The host twin tests the kernels. Here, the operators' CPU kernels run instead, with the arguments of
the launches.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from ops.specs import OPSPECS

from npu.npu_process import BINARY, LAUNCH, LIBRARIES, NEXT_TORCH_NPU, ROOT, STUBS, Npu, make_npu
from tools import abi_audit
from tools.npu.__main__ import SIZES

pytestmark = pytest.mark.slow  # needs `make launch`

ENTRY_POINTS = (ROOT / "csrc/ascendc/plans.h").read_text()
KERNEL_OPS = set(re.findall(r"\bX\((\w+), \w+Params\)", ENTRY_POINTS))
OPS = {op: spec for op, spec in OPSPECS.items() if spec.kernel in KERNEL_OPS}
ON_DEVICE = (ROOT / "tests/npu/npu_checks.py").read_text()
DEF = "\ndef test_"


@pytest.fixture(scope="module")
def npu(tmp_path_factory: pytest.TempPathFactory) -> Npu:
    return make_npu(tmp_path_factory.mktemp("stage"))


CALL = """
import torch, torch_npu, ngram_npu
tensors = [torch.tensor(x, dtype=torch.int32).npu() for x in ([2], [1], [0, 3])]
try:
    torch.ops.ngram_npu.prepare_inputs_padded(*tensors)
    torch.npu.synchronize()
except RuntimeError as error:
    print(*str(error).split())
"""


# Lists the opened libraries of CANN, torch_npu and ngram_npu, and the calls of CANN.
LIST_ACTIVITY = """
import ctypes
def opened():
    names = ["ascendcl", "torch_npu"]
    names += ["ngram_npu_launch", "ngram_npu_ascendc", "ngram_npu_kernels"]
    maps = open("/proc/self/maps").read()
    return [name for name in names if f"lib{name}." in maps or f"/{name}." in maps]
def called():
    if "ascendcl" not in opened():
        return []
    take = ctypes.CDLL("libascendcl.so").stand_in_take_calls
    take.restype = ctypes.c_char_p
    return take().decode().splitlines()
"""
IMPORT = """
import ngram_npu
from ngram_npu import _library
from ngram_npu.engines.vllm import plugin, v1_device as ascend
plugin.install()
plugin.install_ascend()
assert _library.has_kernel("ngram_step_", "npu") and not _library.has_kernel("nothing", "npu")
assert _library.backends()["npu"].kernels == 9
"""


def test_import_does_not_open_libraries(npu: Npu) -> None:
    assert npu.python(LIST_ACTIVITY + IMPORT + "print(opened(), called())") == "[] []"


def test_import_with_torch_npu_does_not_call_cann(npu: Npu) -> None:
    first = LIST_ACTIVITY + "import torch, torch_npu\nassert 'ascendcl' in opened()\ncalled()\n"
    output = npu.python(first + IMPORT + "print(opened(), called())")
    assert output == "['ascendcl', 'torch_npu'] []"
    # A call of an operator is recorded.
    output = npu.python(first + CALL + "print(opened(), len(called()) > 0)").splitlines()[-1]
    assert output == "['ascendcl', 'torch_npu', 'ngram_npu_launch', 'ngram_npu_kernels'] True"


def test_forked_process_loads_kernels_for_its_own_devices(npu: Npu) -> None:
    code = """
import os, sys, torch, torch_npu
called()
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
print(opened(), called())
""".replace("{IMPORT}", IMPORT).replace("{CALL}", CALL.replace("\n", "\n    "))
    output = npu.python(LIST_ACTIVITY + code).splitlines()
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
    state = json.loads(npu.python(code).splitlines()[-1])
    assert state["doctor"] == {"name": "npu", "kernels": len(KERNEL_OPS), "reason": ""}
    assert set(state["registered"]) == set(OPSPECS)
    assert set(state["kernels"]) == set(OPS)
    assert {spec.kernel for spec in OPS.values()} == KERNEL_OPS
    assert KERNEL_OPS


def test_launch_library_has_only_allowed_dependencies(npu: Npu) -> None:
    assert abi_audit.find_problems(npu.stage / "ngram_npu" / "libngram_npu_launch.so") == []


def test_launch_library_builds_with_the_next_torch_npu(npu: Npu, tmp_path: Path) -> None:
    """Compiles and links only, because the next torch_npu does not run with this torch."""
    torch = Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    third_party = ("third_party/acl/inc", "")
    includes = [f"-isystem{NEXT_TORCH_NPU / 'include' / folder}" for folder in third_party]
    includes += [f"-isystem{torch / 'include' / f}" for f in ("", "torch/csrc/api/include")]
    objects = []
    for name in ("launch", "loaded_kernels"):
        objects.append(tmp_path / f"{name}.o")
        source = ["-c", ROOT / f"csrc/ascendc/{name}.cpp", "-o", objects[-1]]
        done = _compile("-std=c++17", "-O0", f"-I{ROOT / 'csrc'}", *includes, *source)
        assert done.returncode == 0, done.stderr
    libraries = [torch / "lib/libc10.so", torch / "lib/libtorch_cpu.so", "-lascendcl", "-ldl"]
    libraries += [f"-L{npu.environment['LD_LIBRARY_PATH']}", "-o", tmp_path / "launch.so"]
    link = ["-shared", "-Wl,--no-undefined", "-Wl,--allow-shlib-undefined", *objects]
    done = _compile(*link, NEXT_TORCH_NPU / "lib/libtorch_npu.so", *libraries)
    assert done.returncode == 0, done.stderr
    # Without torch_npu, linking fails.
    done = _compile(*link, *libraries)
    assert done.returncode != 0
    for name in ("RunOpApi", "getCurrentNPUStream", "apply_tensor_without_format"):
        assert name in done.stderr


def _compile(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-fPIC", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_npu_checks_pass_in_a_process_with_an_npu(npu: Npu) -> None:
    code = "import torch, torch_npu, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    done = npu.run("-c", code, "-q", "-p", "no:cacheprovider", "tests/npu/npu_checks.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"\n(\d+) passed(, \d+ warnings?)? in", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) == ON_DEVICE.count(DEF) - 1 + len(OPS)


def test_npu_tool_runs_doctor_parity_and_bench(npu: Npu, tmp_path: Path) -> None:
    """Runs all stages except the build. Random parity tests are left out, because they would only
    test the CPU kernels again."""
    load = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}  # the default
    load["PYTEST_ADDOPTS"] = "--deselect=tests/ops/test_parity.py::test_random"
    stages = ("doctor", "parity", "bench")
    done = npu.run("-m", "tools.npu", "--out", tmp_path, "--only", *stages, **load)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "npu-run.json").read_text())
    doctor, parity, _ = report["stages"]
    assert f"backend npu          {len(KERNEL_OPS)} kernels" in doctor["result"]
    assert report["bench"]["machine"]["npu"]["name"] == "Ascend910B3"
    assert parity["result"]["passed"] == len(OPS)
    assert list(report["bench"]["skipped"]) == ["vllm-ascend"]
    assert [result["size"] for result in report["bench"]["results"]] == list(SIZES)
    for result in report["bench"]["results"]:
        assert result["ours"]["median_us"] > 0


def test_failed_launch_or_unknown_core_count_raises(npu: Npu) -> None:
    assert "ngram_npu_prepare_inputs_padded" in npu.python(CALL, STAND_IN_FAILS="1")
    output = npu.python(CALL, STAND_IN_CORES="0").splitlines()[-1]
    assert output == "prepare_inputs_padded: the kernel failed: invalid parameters (status 1)"


def _replace_libraries(npu: Npu, folder: Path, *names: str, content: bytes | None = None) -> str:
    """Copies the package without some libraries, or with other contents of them.

    Returns:
        The PYTHONPATH of the copy.
    """
    stage = folder / "stage"
    shutil.copytree(npu.stage, stage)
    for name in names:
        (stage / "ngram_npu" / name).unlink()
        if content is not None:
            (stage / "ngram_npu" / name).write_bytes(content)
    return npu.environment["PYTHONPATH"].replace(str(npu.stage), str(stage))


CALL_AND_LIST_STUBS = (
    LIST_ACTIVITY
    + CALL.replace("    torch.npu.sync", "    called()\n    torch.npu.sync")
    + ("print(tensors[0].shape[0], {'ngram_npu_ascendc'} <= set(opened()))")
)


@pytest.mark.parametrize("content", [None, b"not a binary"])
def test_stubs_are_opened_only_without_a_valid_binary(
    npu: Npu, tmp_path: Path, content: bytes | None
) -> None:
    assert npu.python(CALL_AND_LIST_STUBS) == "1 False"
    path = _replace_libraries(npu, tmp_path, BINARY, content=content)
    assert npu.python(CALL_AND_LIST_STUBS, PYTHONPATH=path) == "1 True"


def test_missing_binary_and_stubs_raise(npu: Npu, tmp_path: Path) -> None:
    path = _replace_libraries(npu, tmp_path, BINARY, STUBS)
    output = npu.python(CALL_AND_LIST_STUBS, PYTHONPATH=path)
    assert output.startswith("prepare_inputs_padded: the kernel failed: launch failed (status 2): ")
    assert f"{STUBS}: cannot open shared object file" in output


# The doctor reports why the backend is absent. The operators then work on the CPU.

CALL_ON_CPU = """
import torch, ngram_npu
tensors = [torch.tensor(x, dtype=torch.int32) for x in ([2], [1], [0, 3])]
assert torch.ops.ngram_npu.prepare_inputs_padded(*tensors)[1].tolist() == [2]
print("\\n".join(line for line in str(ngram_npu.doctor()).splitlines() if "backend npu" in line))
"""


def test_missing_part_is_reported(npu: Npu, tmp_path: Path) -> None:
    assert "torch_npu is not installed" in npu.python(CALL_ON_CPU, PYTHONPATH=str(npu.stage))
    output = npu.python(CALL_ON_CPU, LD_LIBRARY_PATH="")
    assert "torch_npu does not import: lib" in output
    path = _replace_libraries(npu, tmp_path, *LIBRARIES)
    assert "it was made without CANN" in npu.python(CALL_ON_CPU, PYTHONPATH=path)


def test_invalid_library_is_reported(npu: Npu, tmp_path: Path) -> None:
    path = _replace_libraries(npu, tmp_path, LAUNCH, content=b"not a library")
    assert LAUNCH in npu.python(CALL_ON_CPU, PYTHONPATH=path)
    output = npu.python(CALL, PYTHONPATH=path)
    assert output.startswith("prepare_inputs_padded: failed to load the kernels for this device:")
    assert LAUNCH in output
