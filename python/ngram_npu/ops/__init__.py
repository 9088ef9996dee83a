"""The operators as typed functions on torch tensors, with the defaults that the schemas leave out.

Importing this registers their fakes (``torch.compile``, ``FakeTensor``)."""

from ngram_npu.ops.ngram_index_append_ import ngram_index_append_
from ngram_npu.ops.ngram_index_reset_ import ngram_index_reset_
from ngram_npu.ops.ngram_index_step_ import ngram_index_step_
from ngram_npu.ops.ngram_propose import ngram_propose
from ngram_npu.ops.ngram_step_ import ngram_step_

__all__ = [
    "ngram_index_append_",
    "ngram_index_reset_",
    "ngram_index_step_",
    "ngram_propose",
    "ngram_step_",
]
