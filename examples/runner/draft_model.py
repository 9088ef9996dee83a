"""A smaller model beside the n-grams: it drafts from the last tokens of each request."""

from __future__ import annotations

import torch
from ngram_npu.async_state import AsyncSpecState, NeuralDrafts, StepInputs, StepOutputs
from transformers import DynamicCache, PreTrainedModel


class DraftModel:
    """Greedy drafts of a causal LM, computed anew in each step from a window of the newest tokens.

    So it needs no memory between steps, and rejected drafts leave nothing behind. A deployment
    keeps keys and values from step to step instead: `StepOutputs.drafter_batch` says where they go
    on.
    """

    def __init__(self, model: PreTrainedModel, num_drafts: int, window: int) -> None:
        """
        Args:
            model: a causal LM with transformers' own attention and the target's vocabulary.
            num_drafts: per request and step.
            window: tokens that it reads of each request.
        """
        self.model = model
        self._num_drafts = num_drafts
        limit = getattr(model.config, "max_position_embeddings", window + num_drafts)
        self._places = torch.arange(min(window, limit - num_drafts), device=model.device)

    def draft(
        self, state: AsyncSpecState, inputs: StepInputs, outputs: StepOutputs
    ) -> NeuralDrafts:
        """Called by `end_step`, which has appended the newest tokens to the rows. The host does not
        know how long these are: what lies before a row's first token is masked."""
        slots = inputs.slot_indices.long()
        width = len(self._places)
        first = state.num_tokens_on_device[slots].long()[:, None] - width
        places = first + self._places
        tokens = state.token_ids[slots[:, None], places.clamp(min=0)].long()
        positions = (places - first.clamp(min=0)).clamp(min=0)
        seen = places >= 0
        # A place before the first token sees itself: a mask of nothing would make its values NaN.
        mask = self._places[:, None] >= self._places
        mask = (mask & seen[:, None, :]) | torch.eye(width, dtype=torch.bool, device=mask.device)
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
            seen = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
            mask = seen[:, None, :]
        return NeuralDrafts(torch.cat(drafts, 1))
