"""N-gram drafting for speculative decoding in a model runner.

Importing the package registers the operators ``torch.ops.ngram_npu.*`` where torch is installed;
without torch the same CPU kernels work on numpy arrays. :func:`doctor` reports which backends are
available, and why the other backends are not.
"""

from ngram_npu import _library
from ngram_npu._C import __version__, num_threads, set_num_threads
from ngram_npu.config import CONTRACT_VERSION, NgramConfig
from ngram_npu.doctor import Report, doctor
from ngram_npu.draft_costs import Costs
from ngram_npu.index import IndexStatistics, NgramIndex
from ngram_npu.proposer import Drafts, NgramProposer, StepResult
from ngram_npu.store import NgramStore, StoreFileError, StoreStatistics, scope_of
from ngram_npu.tensors import IntegrityError

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


if not _library.get_torch_problem():
    from ngram_npu import ops as ops
