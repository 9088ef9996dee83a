"""The wheel's tag, description and errors, and what building it requires."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path
from platform import machine

import pytest

WHEEL = Path(os.environ.get("NGRAM_NPU_WHEEL", "")).resolve()
ROOT = Path(__file__).resolve().parents[2]
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
        module.ngram_propose(make(tokens), make(lengths), min_n=5, max_n=2, k=3)
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


def relative_links(text: str) -> list[str]:
    return re.findall(r"\]\((?!\w+://)([^)]+)\)", text)


@needs_wheel
@pytest.mark.skipif("ASCEND_HOME_PATH" in os.environ, reason="the NPU backend needs CANN")
def test_auditwheel_confirms_the_tag(tmp_path: Path) -> None:
    platform = WHEEL.stem.rpartition("-")[2]
    assert platform.startswith("manylinux_"), WHEEL.name
    confirmed = _audit(platform, tmp_path)
    assert confirmed.returncode == 0, confirmed.stderr
    too_old = _audit(f"manylinux_2_17_{machine()}", tmp_path)
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


@needs_wheel
def test_the_description_has_no_relative_link() -> None:
    with zipfile.ZipFile(WHEEL) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        description = message_from_bytes(wheel.read(name)).get_payload()
    assert "# ngram_npu" in description
    assert relative_links(description) == []
    assert relative_links((ROOT / "README.md").read_text()), "no link: the rewriting is of no use"


@pytest.mark.parametrize(
    ("value", "torch"), [(None, True), ("ON", True), ("OFF", False), ("0", False)]
)
def test_only_torch_operators_require_torch_to_build(value: str | None, torch: bool) -> None:
    """The build requirements that pip installs."""
    ask = "from scikit_build_core.build import *; print(get_requires_for_build_wheel())"
    environment = {k: v for k, v in os.environ.items() if k != "NGRAM_NPU_TORCH"}
    done = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True, check=True,
        env=environment if value is None else {**environment, "NGRAM_NPU_TORCH": value},
    )  # fmt: skip
    always = re.search(r"^requires = .*$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert always is not None
    assert ("torch==2.13.0" in always[0] + done.stdout) is torch
