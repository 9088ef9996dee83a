"""The operators once more, in plain, slow, obvious Python on numpy arrays: what the kernels are
compared with. Independent of the C++ sources; the definitions are those of docs/ops."""

from reference.bookkeeping import (
    prepare_input_ids_,
    prepare_inputs,
    prepare_inputs_padded,
    prepare_next_token_ids,
)
from reference.correction import (
    compute_slot_mapping_,
    correct_num_computed_tokens_,
    correct_spec_state_,
)
from reference.drafting import (
    ngram_index_append_,
    ngram_index_propose_,
    ngram_index_reset_,
    ngram_index_step_,
    ngram_propose,
    ngram_propose_,
    ngram_step_,
)
from reference.merging import merge_drafts_
from reference.store import ngram_store_finish_, ngram_store_step_

__all__ = [
    "compute_slot_mapping_",
    "correct_num_computed_tokens_",
    "correct_spec_state_",
    "merge_drafts_",
    "ngram_index_append_",
    "ngram_index_propose_",
    "ngram_index_reset_",
    "ngram_index_step_",
    "ngram_propose",
    "ngram_propose_",
    "ngram_step_",
    "ngram_store_finish_",
    "ngram_store_step_",
    "prepare_input_ids_",
    "prepare_inputs",
    "prepare_inputs_padded",
    "prepare_next_token_ids",
]
