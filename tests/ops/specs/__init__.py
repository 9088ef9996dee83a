"""One OpSpec per operator. The modules are the families of operators. The tests in tests/ops are
derived from the OpSpecs for every backend, so a new operator needs an OpSpec but no new tests."""

from . import bookkeeping, correction, drafting, merging, store
from .spec import Args, Array, BadCall, OpSpec, Sample, are_equal, clone, clone_args, find_base

_MODULES = (drafting, store, merging, bookkeeping, correction)
OPSPECS: dict[str, OpSpec] = {
    spec.name: spec
    for module in _MODULES
    for spec in vars(module).values()
    if isinstance(spec, OpSpec)
}

__all__ = [
    "OPSPECS",
    "Args",
    "Array",
    "BadCall",
    "OpSpec",
    "Sample",
    "are_equal",
    "clone",
    "clone_args",
    "find_base",
]
