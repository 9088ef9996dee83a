"""One OpSpec per operator, by family. Parity, opcheck, aliasing, compile, fake, error and fuzz
tests of every backend are derived from these (tests/ops); so adding an operator adds an OpSpec."""

from . import bookkeeping, correction, merging, ngram_index, ngram_propose, ngram_step, store
from .spec import Args, Array, BadCall, OpSpec, Sample, clone, clone_args, owner, same_bits

_MODULES = (ngram_propose, ngram_step, ngram_index, store, merging, bookkeeping, correction)
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
    "clone",
    "clone_args",
    "owner",
    "same_bits",
]
