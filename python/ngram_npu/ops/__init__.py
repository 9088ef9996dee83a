"""The operators as typed functions on torch tensors.

Importing this registers their fakes (``torch.compile``, ``FakeTensor``)."""

from ngram_npu.ops.compute_slot_mapping import compute_slot_mapping_
from ngram_npu.ops.correct_num_computed_tokens import correct_num_computed_tokens_
from ngram_npu.ops.correct_spec_state import computed_tokens_drift, correct_spec_state_
from ngram_npu.ops.merge_drafts import merge_drafts_
from ngram_npu.ops.ngram_index_append import ngram_index_append_
from ngram_npu.ops.ngram_index_propose import ngram_index_propose_
from ngram_npu.ops.ngram_index_reset import ngram_index_reset_
from ngram_npu.ops.ngram_index_step import ngram_index_step_
from ngram_npu.ops.ngram_propose import ngram_propose, ngram_propose_
from ngram_npu.ops.ngram_step import ngram_step_
from ngram_npu.ops.ngram_store_finish import ngram_store_finish_
from ngram_npu.ops.ngram_store_step import ngram_store_step_
from ngram_npu.ops.prepare_input_ids import prepare_input_ids_
from ngram_npu.ops.prepare_inputs import prepare_inputs
from ngram_npu.ops.prepare_inputs_padded import prepare_inputs_padded
from ngram_npu.ops.prepare_next_token_ids import prepare_next_token_ids
from ngram_npu.ops.workspace import workspace_size

__all__ = [
    "compute_slot_mapping_",
    "computed_tokens_drift",
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
    "workspace_size",
]
