"""References of the operators: simple, slow Python on numpy arrays, with which the tests compare
the kernels. The references are independent of the C++ sources; docs/ops has the definitions."""

from ops.reference import bookkeeping, correction, drafting, merging, store
from ops.reference.bookkeeping import *
from ops.reference.correction import *
from ops.reference.drafting import *
from ops.reference.merging import *
from ops.reference.store import *

__all__: list[str] = []
__all__ += bookkeeping.__all__
__all__ += correction.__all__
__all__ += drafting.__all__
__all__ += merging.__all__
__all__ += store.__all__
