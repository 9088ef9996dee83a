"""Is the installed package the one that was built, and are its CUDA kernels loaded?"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import ngram_npu
import torch
from ngram_npu import _library

from tools.bench import environment
from tools.gpu.stages import PREFIX


def problems(package: Path, has_gpu: bool, cuda: _library.Backend) -> list[str]:
    found = []
    if not package.is_relative_to(PREFIX):
        found.append(f"ngram_npu comes from {package}, not from {PREFIX}")
    if not has_gpu:
        found.append("torch sees no GPU")
    if cuda.kernels == 0 or cuda.reason:
        found.append(f"no CUDA kernels: {cuda.reason}")
    return found


def main() -> int:
    print(ngram_npu.doctor())
    package = Path(ngram_npu.__file__).parent
    found = problems(package, torch.cuda.is_available(), _library.backends()["cuda"])
    print(*found, sep="\n")
    if not found:
        print("RESULT", json.dumps({"machine": environment.machine("cuda")}))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
