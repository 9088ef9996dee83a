"""N-gram drafting for speculative decoding, inside a model runner.

Importing the package registers the operators ``torch.ops.ngram_npu.*`` where torch is installed;
without torch the same CPU kernels work on numpy arrays. :func:`doctor` reports what is available
and why something is not.
"""

from ngram_npu import _library
from ngram_npu._C import __version__, num_threads, set_num_threads
from ngram_npu.config import CONTRACT_VERSION, NgramConfig
from ngram_npu.doctor import Report, doctor
from ngram_npu.draft_costs import Costs
from ngram_npu.index import (
    IndexStatistics,
    IntegrityError,
    NgramIndex,
)
from ngram_npu.proposer import Drafts, NgramProposer, StepResult
from ngram_npu.scopes import scope_of
from ngram_npu.store import NgramStore
from ngram_npu.store_file import StoreFileError
from ngram_npu.store_statistics import StoreStatistics

__all__ = [
    "CONTRACT_VERSION",
    "Costs",
    "Drafts",
    "IndexStatistics",
    "IntegrityError",
    "NgramConfig",
    "NgramIndex",
    "NgramProposer",
    "NgramStore",
    "Report",
    "StepResult",
    "StoreFileError",
    "StoreStatistics",
    "__version__",
    "doctor",
    "num_threads",
    "scope_of",
    "set_num_threads",
]


if not _library.torch_absence():
    from ngram_npu import ops as ops
