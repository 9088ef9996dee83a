"""The wheel's tag and errors."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

WHEEL = Path(os.environ.get("NGRAM_NPU_WHEEL", "")).resolve()
BIN = Path(sys.executable).parent
needs_wheel = pytest.mark.skipif(
    WHEEL.suffix != ".whl", reason="`make test` names the wheel in NGRAM_NPU_WHEEL"
)

REFUSED = """
import sys, numpy, torch, ngram_npu
from ngram_npu import _C
assert ngram_npu.__file__.startswith(sys.argv[1]), ngram_npu.__file__
tokens, lengths = numpy.zeros((1, 8), numpy.int32), numpy.zeros(1, numpy.int32)
for module, make in ((torch.ops.ngram_npu, torch.from_numpy), (_C, numpy.asarray)):
    try:
        module.ngram_propose(make(tokens), make(lengths), None, None, 5, 2, 3, 0, False, 8)
    except ValueError as error:
        print(error)
"""


def _audit(platform: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BIN / "auditwheel", "repair", "--only-plat", "--plat", platform, "-w", folder]
        + ["--exclude", "libtorch*.so", WHEEL],
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@needs_wheel
@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="the NPU backend needs CANN")
def test_auditwheel_confirms_the_tag(tmp_path: Path) -> None:
    platform = WHEEL.stem.rpartition("-")[2]
    assert platform.startswith("manylinux_"), WHEEL.name
    confirmed = _audit(platform, tmp_path)
    assert confirmed.returncode == 0, confirmed.stderr
    too_old = _audit("manylinux_2_17_x86_64", tmp_path)
    assert too_old.returncode != 0
    assert "too-recent versioned symbols" in too_old.stderr


@needs_wheel
def test_nothing_is_vendored() -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        libraries = {Path(name).name.split(".")[0] for name in wheel.namelist() if ".so" in name}
    assert all(name == "_C" or name.startswith("libngram_npu") for name in libraries), libraries


@needs_wheel
def test_a_value_error_arrives_through_torch_and_pybind11(tmp_path: Path) -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", REFUSED, tmp_path],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert lines[0].startswith("ngram_propose: ")
