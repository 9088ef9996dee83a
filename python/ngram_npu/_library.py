"""Loads the shared libraries and records why a backend is absent. No other module loads them.

``libngram_npu.so`` registers the torch operators. It is loaded once, because registering them twice
crashes the process. Backend libraries do not depend on torch; loading one registers its kernels for
a device. The first call on an NPU loads the NPU library, which needs torch_npu and CANN: importing
this package must not start them.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import ngram_npu._C as _C

# The folder of the compiled libraries. An editable install keeps this file in another folder.
_PACKAGE = Path(_C.__file__).parent
_NPU_PATH = _PACKAGE / "libngram_npu_launch.so"
_DEVICES = ("cpu", "cuda", "npu")
_MINIMUM_TORCH = (2, 10)
_IMPORT_S = 120
"""Time limit for the import of torch_npu from a slow disk."""
_OLDEST_DRIVERS = {12: 525, 13: 580}
"""Oldest driver for each major version of CUDA, from the section "Minor Version Compatibility" of
NVIDIA's CUDA Compatibility guide."""


@dataclass(frozen=True)
class Backend:
    """State of a backend: the number of its kernels, and why they are absent or cannot run."""

    name: str
    kernels: int = 0
    reason: str = ""


@dataclass
class _State:
    library: ctypes.CDLL | None = None
    reason: str = ""
    backends: dict[str, Backend] = field(default_factory=dict)
    npu_ops: frozenset[str] = frozenset()
    """Operators with a kernel in the NPU library, whether or not it is loaded."""


_state: _State | None = None
_lock = threading.Lock()


def load() -> None:
    """Registers ``torch.ops.ngram_npu`` and loads the backends, once. After a failure,
    :func:`explain_missing_operators` returns the reason."""
    _get_state()


def explain_missing_operators() -> str:
    """Returns why the torch operators are not registered; empty if they are."""
    return _get_state().reason


def backends() -> dict[str, Backend]:
    """Returns every backend by name, present or not. The state of the NPU backend depends on files
    alone; its library is not loaded."""
    return dict(_get_state().backends)


def open_npu() -> Backend:
    """Loads the libraries that the first call on an NPU needs, and returns the resulting state."""
    state = _get_state()
    backend = state.backends["npu"]
    if state.library is None or backend.reason:
        return backend
    if reason := explain_torch_npu_abort():
        return Backend("npu", reason=reason)
    try:
        importlib.import_module("torch_npu")
    except Exception as error:  # for example, CANN's libraries are missing
        first_line = str(error).partition("\n")[0]
        return Backend("npu", reason=f"torch_npu does not import: {first_line}")
    return _load_backend(state.library, "ascendc", "npu", _NPU_PATH)


@functools.cache
def explain_torch_npu_abort() -> str:
    """Imports torch_npu in a child process. Returns why the import ends the process, or that it
    takes too long; empty if it does neither, or if torch_npu is not installed. An exception does
    not end the process."""
    if "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is None:
        return ""
    command = [sys.executable, "-c", "import torch_npu"]
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    try:
        child = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"import torch_npu takes more than {_IMPORT_S} s"
    if child.returncode >= 0:
        return ""
    what = re.search(r"what\(\): *(.+)", child.stderr)
    signal_name = signal.Signals(-child.returncode).name
    return f"import torch_npu ends the process with {signal_name}" + (
        f": {what[1]}" if what else ""
    )


def has_kernel(op: str, device: str) -> bool:
    """Returns whether operator ``op`` has a kernel for ``device`` ("cpu", "cuda" or "npu"). A
    kernel that the first call will load counts too. ``ngram_propose_`` runs the kernel of
    ``ngram_propose``."""
    state = _get_state()
    if state.library is None:
        return False
    names = {op, op.removesuffix("_")}
    if device == "npu" and names & state.npu_ops:
        return True
    device_type = state.library.ngram_npu_device_type(device.encode())
    return any(state.library.ngram_npu_has_kernel(name.encode(), device_type) for name in names)


def cpu_library_path() -> Path:
    return _PACKAGE / "libngram_npu_cpu.so"


def _get_state() -> _State:
    """Returns the state of the libraries. The first call loads the libraries."""
    global _state
    with _lock:
        if _state is None:
            _state = _load()
        return _state


def _load() -> _State:
    path = _PACKAGE / "libngram_npu.so"
    reason = ""
    if importlib.util.find_spec("torch") is None:
        reason = "torch is not installed"
    elif not path.exists():
        reason = "this build has no torch operators (it was made without torch)"
    else:
        try:
            import torch

            version = tuple(int(part) for part in torch.__version__.split(".")[:2])
            if version < _MINIMUM_TORCH:
                reason = f"torch {torch.__version__} is older than 2.10"
        except Exception as error:  # numpy arrays must work even if torch is broken
            reason = f"torch does not import: {error}"
    if reason:
        return _make_state_without_torch(reason)

    try:
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return _make_state_without_torch(str(error))
    string, int32 = ctypes.c_char_p, ctypes.c_int32
    library.ngram_npu_load_backend.argtypes = [string, int32, string, string, ctypes.c_int64]
    library.ngram_npu_defer_backend_loading.argtypes = [string, int32, string]
    library.ngram_npu_device_type.argtypes = [string]
    library.ngram_npu_has_kernel.argtypes = [string, int32]
    npu_backend, npu_ops = _find_npu(library)
    return _State(
        library=library,
        backends={
            "cpu": _load_backend(library, "cpu", "cpu", cpu_library_path()),
            "cuda": _load_cuda(library),
            "npu": npu_backend,
        },
        npu_ops=npu_ops,
    )


def _load_cuda(library: ctypes.CDLL) -> Backend:
    """Loads the CUDA kernels if torch is built with CUDA."""
    import torch

    path = _PACKAGE / "libngram_npu_cuda.so"
    if not path.exists():
        return Backend("cuda", reason="this build has no CUDA kernels (it was made without nvcc)")
    if torch.version.cuda is None:
        return Backend("cuda", reason=f"torch {torch.__version__} is built without CUDA")
    try:
        runtime = ctypes.CDLL(str(path)).ngram_npu_cuda_runtime_version()
    except OSError as error:
        return Backend("cuda", reason=str(error))
    driver = get_cuda_driver_version()
    problem = _find_driver_problem(driver, runtime)
    # Without a driver (0), there are no CUDA tensors, so registered kernels are not launched.
    if driver > 0 and problem:  # every launch of a kernel would fail
        return Backend("cuda", reason=problem)
    loaded = _load_backend(library, "cuda", "cuda", path)
    return replace(loaded, reason=loaded.reason or problem)


def get_cuda_driver_version() -> int:
    """Returns the CUDA version of the driver as 1000 * major + 10 * minor; 0 without a driver. CUDA
    is not initialised, because processes forked later could not use it."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def _find_driver_problem(driver: int, runtime: int) -> str:
    """Returns why a driver cannot run kernels of a CUDA runtime; empty if it can."""
    if driver == 0:
        return "there is no CUDA driver"
    if driver // 1000 >= runtime // 1000:
        return ""
    oldest = _OLDEST_DRIVERS.get(runtime // 1000)
    required_version = f"CUDA {runtime // 1000}" + (f" ({oldest} or later)" if oldest else "")
    supported_version = f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    return f"the kernels need a driver for {required_version}, this one is for {supported_version}"


def _find_npu(library: ctypes.CDLL) -> tuple[Backend, frozenset[str]]:
    """Finds the library of AscendC kernels, which is linked to torch_npu and launches through
    torch_npu's queue. The file is searched for the names of its entry points, which show for which
    operators it has kernels, so the library need not be loaded."""
    if not _NPU_PATH.exists():
        reason = "this build has no AscendC kernels (it was made without CANN)"
        return Backend("npu", reason=reason), frozenset()
    if importlib.util.find_spec("torch_npu") is None:
        return Backend("npu", reason="torch_npu is not installed"), frozenset()
    names = re.findall(rb"(?<=\0)ngram_npu_ascendc_(\w+)(?=\0)", _NPU_PATH.read_bytes())
    ops = frozenset(name.decode() for name in names) - {"error"}
    library.ngram_npu_defer_backend_loading(
        b"ascendc", library.ngram_npu_device_type(b"npu"), str(_NPU_PATH).encode()
    )
    return Backend("npu", kernels=len(ops)), ops


def _make_state_without_torch(reason: str) -> _State:
    cpu_backend = {"cpu": Backend("cpu", reason=f"on numpy arrays only: {reason}")}
    other_backends = {name: Backend(name, reason=reason) for name in _DEVICES if name != "cpu"}
    return _State(reason=reason, backends=cpu_backend | other_backends)


def _load_backend(library: ctypes.CDLL, prefix: str, device: str, path: Path) -> Backend:
    """Registers a library's entry points ``ngram_npu_<prefix>_<op>`` as kernels for a device."""
    error = ctypes.create_string_buffer(1024)
    device_type = library.ngram_npu_device_type(device.encode())
    kernels: int = library.ngram_npu_load_backend(
        prefix.encode(), device_type, str(path).encode(), error, len(error)
    )
    if kernels < 0:
        return Backend(device, reason=error.value.decode(errors="replace"))
    return Backend(device, kernels=kernels)
