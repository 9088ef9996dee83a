"""The operators as typed functions on torch tensors.

Importing this registers their fakes (``torch.compile``, ``FakeTensor``)."""

from ngram_npu.ops import bookkeeping, correction, drafting, merging, store
from ngram_npu.ops.bookkeeping import *
from ngram_npu.ops.correction import *
from ngram_npu.ops.drafting import *
from ngram_npu.ops.merging import *
from ngram_npu.ops.store import *
from ngram_npu.ops.workspace import workspace_size

__all__ = ["workspace_size"]
__all__ += bookkeeping.__all__
__all__ += correction.__all__
__all__ += drafting.__all__
__all__ += merging.__all__
__all__ += store.__all__
