"""The operators once more, in plain, slow, obvious Python on numpy arrays: what the kernels are
compared with. Independent of the C++ sources; the definitions are those of docs/ops."""

from reference import bookkeeping, correction, drafting, merging, store
from reference.bookkeeping import *
from reference.correction import *
from reference.drafting import *
from reference.merging import *
from reference.store import *

__all__: list[str] = []
__all__ += bookkeeping.__all__
__all__ += correction.__all__
__all__ += drafting.__all__
__all__ += merging.__all__
__all__ += store.__all__
