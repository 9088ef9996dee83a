"""Wheels for manylinux: a cross build is named for its machine, a wrong tag and a failed trial are
noticed. Builds themselves take minutes each and run for a release."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import wheels


def test_only_a_build_for_another_machine_names_it() -> None:
    defines, changes = wheels.plan("3.10", "x86_64", "x86_64")
    assert "NGRAM_NPU_MANYLINUX=ON" in defines
    assert not set(defines) & set(wheels.CROSS)
    assert changes == {}
    crossed, changes = wheels.plan("3.10", "aarch64", "x86_64")
    assert crossed == [*defines, *wheels.CROSS]
    assert changes == {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": ".cpython-310-aarch64-linux-gnu.so",
    }


@pytest.mark.parametrize(
    ("tag", "right"),
    [
        ("cp312-cp312-manylinux_2_28_aarch64", True),
        ("cp312-cp312-manylinux_2_27_aarch64", True),
        ("cp312-cp312-manylinux_2_35_aarch64", False),
        ("cp312-cp312-manylinux_2_28_x86_64", False),
        ("cp312-cp312-linux_aarch64", False),
        ("cp311-cp311-manylinux_2_28_aarch64", False),
    ],
)
def test_a_wrong_tag_is_found(tag: str, right: bool) -> None:
    problem = wheels.tag_problem(f"ngram_npu-1.2.3-{tag}.whl", "3.12", "aarch64")
    assert (problem == "") is right


def test_an_emulated_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails if its command fails, and says what it lacks."""
    said, failed = wheels.tried([sys.executable, "-c", "print(1); exit(3)"], {})
    assert (said, failed) == ("1\nexit status 3", True)
    assert not wheels.tried([sys.executable, "-c", "import os; os.environ['A_B']"], {"A_B": ""})[1]
    monkeypatch.setattr(wheels, "BUILD", tmp_path)
    said, failed = wheels.emulated("3.12", "aarch64", tmp_path / "a.whl")
    assert said.startswith("built, not tried: no ")
    assert not failed
