"""A neural drafter: a smaller model that drafts from the newest tokens of each request."""

from __future__ import annotations

import torch
from ngram_npu.async_state import AsyncSpecState, NeuralDrafts, StepInputs, StepOutputs
from transformers import DynamicCache, PreTrainedModel


class DraftModel:
    """Drafts greedily with a causal LM, from a window of each request's newest tokens.

    Each step computes the window again, so the drafter keeps no state between steps and rejected
    drafts need no cleanup. A deployment would keep its KV cache between steps and continue at the
    positions in `StepOutputs.drafter_batch`.
    """

    def __init__(self, model: PreTrainedModel, num_drafts: int, window: int) -> None:
        """
        Args:
            model: a causal LM with transformers' own attention and the target's vocabulary.
            num_drafts: draft tokens per request and step.
            window: number of newest tokens of each request that the model reads.
        """
        self.model = model
        self._num_drafts = num_drafts
        max_positions = getattr(model.config, "max_position_embeddings", window + num_drafts)
        self._offsets = torch.arange(min(window, max_positions - num_drafts), device=model.device)

    def draft(
        self, state: AsyncSpecState, inputs: StepInputs, outputs: StepOutputs
    ) -> NeuralDrafts:
        """Drafts for all requests of a step. `AsyncSpecState.end_step` calls this method.

        The rows already end with the newest tokens. Only the device knows the rows' lengths, so
        every window has the full width, and positions before a row's first token are masked.
        """
        slots = inputs.slot_indices.long()
        width = len(self._offsets)
        window_begin = state.num_tokens_on_device[slots].long()[:, None] - width
        row_positions = window_begin + self._offsets
        tokens = state.token_ids[slots[:, None], row_positions.clamp(min=0)].long()
        # The model's positions count from the first token in the window.
        positions = (row_positions - window_begin.clamp(min=0)).clamp(min=0)
        has_token = row_positions >= 0
        # A masked position attends to itself, because softmax over an empty row is NaN.
        mask = self._offsets[:, None] >= self._offsets
        is_diagonal = torch.eye(width, dtype=torch.bool, device=mask.device)
        mask = (mask & has_token[:, None, :]) | is_diagonal
        cache, drafts = DynamicCache(), []
        for _ in range(self._num_drafts):
            logits = self.model(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask[:, None],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits
            tokens = logits.argmax(-1)
            drafts.append(tokens)
            positions = positions[:, -1:] + 1
            has_token = torch.cat([has_token, torch.ones_like(has_token[:, :1])], 1)
            mask = has_token[:, None, :]
        return NeuralDrafts(torch.cat(drafts, 1))
