"""Stand-ins for CUDA's libraries let a torch for CUDA load where they are missing."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

from tools import torches

OTHER = "int cuPlain(void); int other(void) { return cuPlain(); }"
USER = """
int cuVersioned(void); int cuPlain(void);
int versioned(void) { return cuVersioned(); }
int plain(void) { return cuPlain(); }
"""


def _link(library: Path, source: str, *options: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", library, *options]
    subprocess.run(command, input=source, text=True, check=True)


def test_library_with_stand_ins_loads_and_sees_no_device(tmp_path: Path) -> None:
    real = {name: tmp_path / f"lib{name}.so.13" for name in ("cu_versioned", "nv_plain")}
    script = tmp_path / "script.map"
    script.write_text("libcu_versioned.so.13 { global: *; };\n")
    soname = "-Wl,-soname,lib{}.so.13"
    versioned = (f"-Wl,--version-script={script}", soname.format("cu_versioned"))
    _link(real["cu_versioned"], "int cuVersioned(void) { return 0; }", *versioned)
    _link(real["nv_plain"], "int cuPlain(void) { return 0; }", soname.format("nv_plain"))
    user, other = tmp_path / "libuser.so", tmp_path / "libother.so"
    _link(user, USER, "-Wl,-rpath,$ORIGIN", *(str(path) for path in real.values()))
    _link(other, OTHER, "-Wl,-rpath,$ORIGIN", str(real["nv_plain"]))
    for path in real.values():
        path.unlink()
    torches.write_stand_ins(tmp_path)
    assert ctypes.CDLL(str(other)).other() == torches.NO_DEVICE
    loaded = ctypes.CDLL(str(user))
    assert (loaded.versioned(), loaded.plain()) == (torches.NO_DEVICE, torches.NO_DEVICE)
