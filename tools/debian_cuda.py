"""Gets nvcc of CUDA 12 from Debian 13, because PyPI's packages of CUDA 12 have no nvcc. Binaries of
CUDA 12 serve drivers from 525 on, those of CUDA 13 from 580 on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = "deb [signed-by={keys}] http://deb.debian.org/debian trixie non-free\n"
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
PACKAGES = ("nvidia-cuda-toolkit", "nvidia-cuda-dev")
# Debian's own names absolute folders.
PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""


def debian_nvcc(folder: Path) -> Path:
    """nvcc 12.4 in `folder`, where Debian's packages (1 GB) are unpacked once, not installed."""
    nvcc = folder / "bin" / "nvcc"
    if nvcc.exists():
        return nvcc
    shutil.rmtree(folder, ignore_errors=True)
    unpacked = folder / "debian"
    for path in ("lists/partial", "archives/partial", "debian"):
        (folder / path).mkdir(parents=True)
    sources = folder / "sources.list"
    sources.write_text(SOURCE.format(keys=KEYS))
    settings = (
        f"Dir::Etc::SourceList={sources}",
        "Dir::Etc::SourceParts=-",
        f"Dir::State::Lists={folder / 'lists'}",
        f"Dir::Cache={folder}",
        "APT::Sandbox::User=root",
    )
    apt = ["apt-get", "--quiet", *(word for setting in settings for word in ("-o", setting))]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        package.unlink()
    usr = unpacked / "usr"
    own = usr / "lib" / "nvidia-cuda-toolkit"
    kept = {usr / "bin": "", usr / "include": "", own / "libdevice": "nvvm"}
    kept |= {
        own / "bin" / tool: "bin" for tool in ("cicc", "crt", "nvcc")
    }  # usr/bin/nvcc is a script
    libraries = usr / "lib" / "x86_64-linux-gnu"
    kept |= {libraries / f"lib{name}.a": "lib64" for name in ("cudart_static", "cudadevrt")}
    for source, target in kept.items():
        (folder / target).mkdir(exist_ok=True)
        source.rename(folder / target / source.name)
    (folder / "bin" / "nvcc.profile").write_text(PROFILE)
    shutil.rmtree(unpacked)
    return nvcc
