"""The operators as typed functions on torch tensors.

Importing this registers their fakes (``torch.compile``, ``FakeTensor``)."""

from ngram_npu.ops.bookkeeping import (
    prepare_input_ids_,
    prepare_inputs,
    prepare_inputs_padded,
    prepare_next_token_ids,
)
from ngram_npu.ops.correction import (
    compute_slot_mapping_,
    computed_tokens_drift,
    correct_num_computed_tokens_,
    correct_spec_state_,
)
from ngram_npu.ops.drafting import (
    ngram_index_append_,
    ngram_index_propose_,
    ngram_index_reset_,
    ngram_index_step_,
    ngram_propose,
    ngram_propose_,
    ngram_step_,
)
from ngram_npu.ops.merging import merge_drafts_
from ngram_npu.ops.store import ngram_store_finish_, ngram_store_step_
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
