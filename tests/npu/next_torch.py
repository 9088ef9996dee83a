"""Makes a CUDA build of torch import on a machine without CUDA, beside a torch_npu.

    python tests/npu/next_torch.py FOLDER

FOLDER contains torch. Only CUDA builds are on PyPI. In place of the CUDA libraries (3 GB), torch
loads stand-ins with the same names, versions and symbols, whose functions return
cudaErrorNoDevice. libc10_cuda.so gets other names for the two settings of its allocator that
torch_npu registers, too: with a name registered twice, the import ends the process.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

NVIDIA_LIBRARY = "lib(cu|nv|nccl)"
NO_DEVICE = 100  # cudaErrorNoDevice
# The compiler has split the names into parts of 16 bytes.
SHARED_SETTINGS = (b"pinned_reserve_s", b"per_process_memo")


def _run_readelf(library: Path, option: str) -> str:
    return subprocess.check_output(["readelf", "--wide", option, library], text=True)


def find_cuda_symbols(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Returns the symbols that the libraries in a folder need from NVIDIA's libraries, by library
    and version. A symbol without a version may belong to any library, so all libraries get it."""
    libraries: dict[str, dict[str, set[str]]] = {}
    undefined_symbols: dict[str, set[str]] = defaultdict(set)
    defined_symbols: set[str] = set()
    for library in folder.glob("*.so*"):
        for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _run_readelf(library, "--dynamic")):
            if re.match(NVIDIA_LIBRARY, name):
                libraries.setdefault(name, {})
        versions: dict[str, set[str]] = {}
        for line in _run_readelf(library, "--version-info").splitlines():
            if file := re.search(r" File: (\S+) ", line):
                versions = libraries.get(file[1], {})
            elif version := re.search(r" Name: (\S+) .* Version: ", line):
                versions[version[1]] = undefined_symbols[version[1]]
        for line in _run_readelf(library, "--dyn-syms").splitlines():
            fields = line.split()
            if len(fields) > 7 and fields[4] == "GLOBAL":
                symbol, _, version_name = fields[7].partition("@")
                is_undefined = fields[6] == "UND"
                (undefined_symbols[version_name] if is_undefined else defined_symbols).add(symbol)
    candidates = undefined_symbols[""] - defined_symbols
    unversioned_symbols = {name for name in candidates if re.match("cu|nccl|nv", name)}
    for versions in libraries.values():
        version_name = next(iter(versions), "")
        versions[version_name] = versions.get(version_name, set()) | unversioned_symbols
    return libraries


def write_stand_ins(folder: Path) -> None:
    """Compiles a stand-in for each NVIDIA library into the folder in which torch searches."""
    for library, versions in find_cuda_symbols(folder).items():
        names = set().union(*versions.values())
        code = "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in names)
        script = folder / f"{library}.map"
        with script.open("w") as file:
            for version, symbols in versions.items():
                file.write(f"{version} {{ {' '.join(f'{symbol};' for symbol in symbols)} }};\n")
        flags = ["-shared", "-fPIC", "-w", "-fno-builtin", "-nostdlib", f"-Wl,-soname,{library}"]
        command = ["gcc", "-x", "c", "-", *flags, f"-Wl,--version-script={script}"]
        subprocess.run([*command, "-o", folder / library], input=code, text=True, check=True)
        script.unlink()


def rename_shared_settings(library: Path) -> None:
    content = library.read_bytes()
    for name in SHARED_SETTINGS:
        content = content.replace(name, b"X" + name[1:])
    library.write_bytes(content)


if __name__ == "__main__":
    libraries = Path(sys.argv[1]) / "torch" / "lib"
    write_stand_ins(libraries)
    rename_shared_settings(libraries / "libc10_cuda.so")
