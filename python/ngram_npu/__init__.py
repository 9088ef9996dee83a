"""N-gram drafting for speculative decoding in a model runner.

Importing the package registers the operators ``torch.ops.ngram_npu.*`` where torch is installed;
without torch the same CPU kernels work on numpy arrays. :func:`doctor` reports which backends are
available, and why the other backends are not.
"""

from ngram_npu import _library
from ngram_npu._C import __version__, num_threads, set_num_threads
from ngram_npu.config import CONTRACT_VERSION, NgramConfig
from ngram_npu.doctor import Report, doctor
from ngram_npu.proposer import Drafts, NgramProposer, StepResult
from ngram_npu.store import (
    PRIVATE_SCOPE,
    NgramStore,
    Scope,
    StoreFileError,
    StoreStatistics,
    scope_of,
)

__all__ = [
    "CONTRACT_VERSION",
    "PRIVATE_SCOPE",
    "Drafts",
    "NgramConfig",
    "NgramProposer",
    "NgramStore",
    "Report",
    "Scope",
    "StepResult",
    "StoreFileError",
    "StoreStatistics",
    "__version__",
    "doctor",
    "num_threads",
    "scope_of",
    "set_num_threads",
]


if not _library.explain_missing_operators():
    from ngram_npu import ops as ops
