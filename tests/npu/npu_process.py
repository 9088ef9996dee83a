"""Runs Python with a simulated NPU: the installed package, the NPU backend that `make test-slow`
builds, torch_npu, and stand-ins for CANN that use host memory as device memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import ngram_npu

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ.get("NGRAM_NPU_BUILD", ROOT / "build"))
NEXT_TORCH, NEXT_TORCH_NPU = BUILD / "torch-next", BUILD / "torch-npu-next"
NEXT_CANN = BUILD / "cann-next" / "lib64"
LAUNCH, BINARY = "libngram_npu_launch.so", "ngram_npu_kernels.o"
LIBRARIES = (LAUNCH, BINARY)
# The variables of an installed CANN are removed.
_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_")}


@dataclass(frozen=True)
class Npu:
    folder: Path
    """Contains a copy of the package `ngram_npu`."""
    environment: dict[str, str]

    def run(self, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**_ENVIRONMENT, **self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,  # 20 times the longest run, because the machine may be busy
        )

    def run_code(self, code: str, **environment: str) -> str:
        """Runs Python code. Returns its output without torch_npu's warnings about the stand-ins."""
        result = self.run("-c", code, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        lines = result.stdout.strip().splitlines()
        return "\n".join(line for line in lines if not line.startswith("Warning: ASCEND_"))


def make_npu(folder: Path) -> Npu:
    package = BUILD / "launch" / "ngram_npu"
    torch_npu = BUILD / "torch-npu"
    for path in (*(package / name for name in LIBRARIES), torch_npu / "torch_npu"):
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing; run `make test-slow`")
    shutil.copytree(Path(ngram_npu.__file__).parent, folder / "ngram_npu")
    for name in LIBRARIES:
        shutil.copy(package / name, folder / "ngram_npu")
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, (folder, torch_npu))),
        "LD_LIBRARY_PATH": str(BUILD / "cann" / "lib64"),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    return Npu(folder, environment)
