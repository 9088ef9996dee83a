"""The NPU backend with the real torch_npu and stand-ins for CANN: loading, registration, launches
and their order, and the results. The host twin tests the kernels' code; here the operators' CPU
kernels run in their place, on the arguments of the launches."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from ops.specs import OPSPECS

from npu.npu_process import BINARY, LAUNCH, LIBRARIES, NEXT_TORCH_NPU, ROOT, STUBS, Npu
from tools import abi_audit
from tools.npu.__main__ import SIZES

pytestmark = pytest.mark.slow  # needs `make launch`

ENTRY_POINTS = (ROOT / "csrc/ascendc/plans.h").read_text()
SERVED = set(re.findall(r"\bX\((\w+), \w+Params\)", ENTRY_POINTS))
OPS = {op: spec for op, spec in OPSPECS.items() if spec.kernel in SERVED}
ON_DEVICE = (ROOT / "tests/npu/npu_checks.py").read_text()
DEF = "\ndef test_"

CALL = """
import torch, torch_npu, ngram_npu
tensors = [torch.tensor(x, dtype=torch.int32).npu() for x in ([2], [1], [0, 3])]
try:
    torch.ops.ngram_npu.prepare_inputs_padded(*tensors)
    torch.npu.synchronize()
except RuntimeError as error:
    print(*str(error).split())
"""


# The libraries of CANN, torch_npu and ngram_npu that a process has opened, and the calls of CANN.
STARTED = """
import ctypes
def opened():
    ours = ("ascendcl", "torch_npu", "ngram_npu_launch", "ngram_npu_ascendc", "ngram_npu_kernels")
    maps = open("/proc/self/maps").read()
    return [name for name in ours if f"lib{name}." in maps or f"/{name}." in maps]
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


def test_importing_starts_nothing(npu: Npu) -> None:
    assert npu.python(STARTED + IMPORT + "print(opened(), called())") == "[] []"


def test_importing_beside_torch_npu_calls_nothing(npu: Npu) -> None:
    first = STARTED + "import torch, torch_npu\nassert 'ascendcl' in opened()\ncalled()\n"
    said = npu.python(first + IMPORT + "print(opened(), called())")
    assert said == "['ascendcl', 'torch_npu'] []"
    # The check bites: a call is seen.
    said = npu.python(first + CALL + "print(opened(), len(called()) > 0)").splitlines()[-1]
    assert said == "['ascendcl', 'torch_npu', 'ngram_npu_launch', 'ngram_npu_kernels'] True"


def test_a_child_loads_for_the_devices_that_it_chose(npu: Npu) -> None:
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
    said = npu.python(STARTED + code).splitlines()
    assert said == [
        "['load, devices 3', 'ngram_npu_prepare_inputs_padded']",
        "['ascendcl', 'torch_npu'] []",
    ]


def test_every_kernel_is_found_and_registered(npu: Npu) -> None:
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
    found = json.loads(npu.python(code).splitlines()[-1])
    assert found["doctor"] == {"name": "npu", "kernels": len(SERVED), "reason": ""}
    assert set(found["registered"]) == set(OPSPECS)
    assert set(found["kernels"]) == set(OPS)
    assert {spec.kernel for spec in OPS.values()} == SERVED
    assert SERVED


def test_the_launch_library_needs_what_is_there(npu: Npu) -> None:
    assert abi_audit.problems(npu.stage / "ngram_npu" / "libngram_npu_launch.so") == []


def test_the_next_torch_npu_has_what_the_launches_call(npu: Npu, tmp_path: Path) -> None:
    """Compiles with its headers and links to it, with this torch: it runs only with the next."""
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
    rest = [torch / "lib/libc10.so", torch / "lib/libtorch_cpu.so", "-lascendcl", "-ldl"]
    rest += [f"-L{npu.environment['LD_LIBRARY_PATH']}", "-o", tmp_path / "launch.so"]
    link = ["-shared", "-Wl,--no-undefined", "-Wl,--allow-shlib-undefined", *objects]
    done = _compile(*link, NEXT_TORCH_NPU / "lib/libtorch_npu.so", *rest)
    assert done.returncode == 0, done.stderr
    # The check bites: without it they are missing.
    done = _compile(*link, *rest)
    assert done.returncode != 0
    for name in ("RunOpApi", "getCurrentNPUStream", "apply_tensor_without_format"):
        assert name in done.stderr


def _compile(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-fPIC", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_on_the_device(npu: Npu) -> None:
    code = "import torch, torch_npu, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    done = npu.run("-c", code, "-q", "-p", "no:cacheprovider", "tests/npu/npu_checks.py")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"\n(\d+) passed(, \d+ warnings?)? in", done.stdout)
    assert passed is not None, done.stdout
    assert int(passed[1]) == ON_DEVICE.count(DEF) - 1 + len(OPS)


def test_what_a_person_with_an_npu_runs(npu: Npu, tmp_path: Path) -> None:
    """Everything but the build: the doctor, the parity suite on the device, the benchmark. Of the
    suite the samples: on stand-ins random calls would only try the CPU's kernels again."""
    load = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}  # as it is by default
    load["PYTEST_ADDOPTS"] = "--deselect=tests/ops/test_parity.py::test_random"
    stages = ("doctor", "parity", "bench")
    done = npu.run("-m", "tools.npu", "--out", tmp_path, "--only", *stages, **load)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "npu-run.json").read_text())
    doctor, parity, _ = found["stages"]
    assert f"backend npu          {len(SERVED)} kernels" in doctor["result"]
    assert found["bench"]["machine"]["npu"]["name"] == "Ascend910B3"
    assert parity["result"]["passed"] == len(OPS)
    assert list(found["bench"]["skipped"]) == ["vllm-ascend"]
    assert [result["size"] for result in found["bench"]["results"]] == list(SIZES)
    for result in found["bench"]["results"]:
        assert result["ours"]["median_us"] > 0


def test_a_launch_that_fails_is_an_error(npu: Npu) -> None:
    assert "ngram_npu_prepare_inputs_padded" in npu.python(CALL, STAND_IN_FAILS="1")


def test_a_device_that_does_not_tell_its_cores(npu: Npu) -> None:
    said = npu.python(CALL, STAND_IN_CORES="0").splitlines()[-1]
    assert said == "prepare_inputs_padded: the kernel returned status 1"


class TestFallback:
    """Without a loadable binary CANN's launch stubs are used; without both the error says why."""

    CODE = (
        STARTED
        + CALL.replace("    torch.npu.sync", "    called()\n    torch.npu.sync")
        + ("print(tensors[0].shape[0], {'ngram_npu_ascendc'} <= set(opened()))")
    )

    def without(self, npu: Npu, folder: Path, *names: str, text: bytes | None = None) -> str:
        stage = folder / "stage"
        shutil.copytree(npu.stage, stage)
        for name in names:
            (stage / "ngram_npu" / name).unlink()
            if text is not None:
                (stage / "ngram_npu" / name).write_bytes(text)
        path = npu.environment["PYTHONPATH"].replace(str(npu.stage), str(stage))
        return npu.python(self.CODE, PYTHONPATH=path)

    @pytest.mark.parametrize("text", [None, b"not a binary"])
    def test_stubs(self, npu: Npu, tmp_path: Path, text: bytes | None) -> None:
        assert self.without(npu, tmp_path, BINARY, text=text) == "1 True"

    def test_stubs_are_not_opened_beside_a_binary(self, npu: Npu, tmp_path: Path) -> None:
        assert self.without(npu, tmp_path) == "1 False"

    def test_neither(self, npu: Npu, tmp_path: Path) -> None:
        said = self.without(npu, tmp_path, BINARY, STUBS)
        assert said.startswith("prepare_inputs_padded: the kernel returned status 2 (the launch")
        assert f"{STUBS}: cannot open shared object file" in said


class TestReasons:
    """The doctor's reason if the backend is absent; the operators work on the CPU."""

    CODE = """
import torch, ngram_npu
tensors = [torch.tensor(x, dtype=torch.int32) for x in ([2], [1], [0, 3])]
assert torch.ops.ngram_npu.prepare_inputs_padded(*tensors)[1].tolist() == [2]
print("\\n".join(line for line in str(ngram_npu.doctor()).splitlines() if "backend npu" in line))
"""

    def test_no_torch_npu(self, npu: Npu) -> None:
        assert "torch_npu is not installed" in npu.python(self.CODE, PYTHONPATH=str(npu.stage))

    def test_no_cann(self, npu: Npu) -> None:
        said = npu.python(self.CODE, LD_LIBRARY_PATH="")
        assert "torch_npu does not import: lib" in said

    def test_no_kernels(self, npu: Npu, tmp_path: Path) -> None:
        shutil.copytree(npu.stage, tmp_path / "stage")
        for name in LIBRARIES:
            (tmp_path / "stage" / "ngram_npu" / name).unlink()
        path = npu.environment["PYTHONPATH"].replace(str(npu.stage), str(tmp_path / "stage"))
        assert "it was made without CANN" in npu.python(self.CODE, PYTHONPATH=path)

    def test_a_library_that_does_not_load(self, npu: Npu, tmp_path: Path) -> None:
        shutil.copytree(npu.stage, tmp_path / "stage")
        (tmp_path / "stage" / "ngram_npu" / LAUNCH).write_bytes(b"not a library")
        path = npu.environment["PYTHONPATH"].replace(str(npu.stage), str(tmp_path / "stage"))
        assert LAUNCH in npu.python(self.CODE, PYTHONPATH=path)
        said = npu.python(CALL, PYTHONPATH=path)
        assert said.startswith("prepare_inputs_padded: this device's kernels do not load:")
        assert LAUNCH in said
