"""The operators once more, in plain, slow, obvious Python on numpy arrays: what the kernels are
compared with. Independent of the C++ sources; the definitions are those of docs/ops."""

from ngram_npu.reference.compute_slot_mapping import compute_slot_mapping_
from ngram_npu.reference.correct_num_computed_tokens import correct_num_computed_tokens_
from ngram_npu.reference.correct_spec_state import correct_spec_state_
from ngram_npu.reference.merge_drafts import merge_drafts_
from ngram_npu.reference.ngram_index_append import ngram_index_append_
from ngram_npu.reference.ngram_index_propose import ngram_index_propose_
from ngram_npu.reference.ngram_index_reset import ngram_index_reset_
from ngram_npu.reference.ngram_index_step import ngram_index_step_
from ngram_npu.reference.ngram_propose import ngram_propose, ngram_propose_
from ngram_npu.reference.ngram_step import ngram_step_
from ngram_npu.reference.ngram_store_finish import ngram_store_finish_
from ngram_npu.reference.ngram_store_step import ngram_store_step_
from ngram_npu.reference.prepare_input_ids import prepare_input_ids_
from ngram_npu.reference.prepare_inputs import prepare_inputs
from ngram_npu.reference.prepare_inputs_padded import prepare_inputs_padded
from ngram_npu.reference.prepare_next_token_ids import prepare_next_token_ids

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
