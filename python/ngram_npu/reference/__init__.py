"""The operators once more, in plain, slow, obvious Python on numpy arrays: what the kernels are
compared with. Independent of the C++ sources; the definitions are those of docs/ops."""

from ngram_npu.reference.ngram_index_append_ import ngram_index_append_
from ngram_npu.reference.ngram_index_reset_ import ngram_index_reset_
from ngram_npu.reference.ngram_index_step_ import ngram_index_step_
from ngram_npu.reference.ngram_propose import ngram_propose
from ngram_npu.reference.ngram_step_ import ngram_step_

__all__ = [
    "ngram_index_append_",
    "ngram_index_reset_",
    "ngram_index_step_",
    "ngram_propose",
    "ngram_step_",
]
