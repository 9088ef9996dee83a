"""One OpSpec per operator. Parity, opcheck, aliasing, compile, fake, error and fuzz tests of every
backend are derived from these (tests/ops); so adding an operator adds one file here."""

from . import (
    compute_slot_mapping,
    correct_num_computed_tokens,
    correct_spec_state,
    merge_drafts,
    ngram_index_append,
    ngram_index_propose,
    ngram_index_reset,
    ngram_index_step,
    ngram_propose,
    ngram_step,
    ngram_store_finish,
    ngram_store_step,
    prepare_input_ids,
    prepare_inputs,
    prepare_inputs_padded,
    prepare_next_token_ids,
)
from .spec import Args, Array, BadCall, OpSpec, Sample, clone, clone_args, owner, same_bits

OPSPECS: dict[str, OpSpec] = {
    spec.name: spec
    for spec in (
        ngram_propose.SPEC,
        ngram_propose.SPEC_INTO,
        ngram_step.SPEC,
        ngram_index_propose.SPEC,
        ngram_index_step.SPEC,
        ngram_index_append.SPEC,
        ngram_index_reset.SPEC,
        ngram_store_step.SPEC,
        ngram_store_finish.SPEC,
        merge_drafts.SPEC,
        prepare_next_token_ids.SPEC,
        prepare_inputs_padded.SPEC,
        prepare_inputs.SPEC,
        correct_num_computed_tokens.SPEC,
        compute_slot_mapping.SPEC,
        correct_spec_state.SPEC,
        prepare_input_ids.SPEC,
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
