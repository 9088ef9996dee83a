"""One OpSpec per operator. Parity, opcheck, aliasing, compile, fake, error and fuzz tests of every
backend are derived from these (tests/ops); so adding an operator adds one file here."""

from . import (
    compute_slot_mapping_,
    correct_num_computed_tokens_,
    correct_spec_state_,
    ngram_index_append_,
    ngram_index_reset_,
    ngram_index_step_,
    ngram_propose,
    ngram_step_,
    prepare_input_ids_,
    prepare_inputs,
    prepare_inputs_padded,
    prepare_next_token_ids,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, clone, clone_args, owner, same_bits

OPSPECS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        ngram_propose.SPEC,
        ngram_step_.SPEC,
        ngram_index_step_.SPEC,
        ngram_index_append_.SPEC,
        ngram_index_reset_.SPEC,
        prepare_next_token_ids.SPEC,
        prepare_inputs_padded.SPEC,
        prepare_inputs.SPEC,
        correct_num_computed_tokens_.SPEC,
        compute_slot_mapping_.SPEC,
        correct_spec_state_.SPEC,
        prepare_input_ids_.SPEC,
    )
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
