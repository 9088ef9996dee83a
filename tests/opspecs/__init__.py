"""One OpSpec per operator. Parity, opcheck, aliasing, compile, fake, error and fuzz tests of every
backend are derived from these (tests/ops); so adding an operator adds one file here."""

from . import ngram_propose, ngram_step_
from .spec import Args, Array, BadCall, OpSpec, Sample, clone, clone_args, owner, same_bits

OPSPECS: dict[str, OpSpec] = {spec.name: spec for spec in (ngram_propose.SPEC, ngram_step_.SPEC)}

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
