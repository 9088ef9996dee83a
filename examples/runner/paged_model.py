"""Runs a Hugging Face causal LM with a paged KV cache, whose slots AsyncSpecState computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from ngram_npu.async_state import StepInputs
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

ATTENTION_NAME = "ngram_npu_paged"
"""The name of :func:`paged_attention` in transformers."""

IntArray = npt.NDArray[np.integer[Any]]


@dataclass
class PagedKVCache:
    """Keys and values of all requests: [num_slots, heads, head_size] per layer, allocated when the
    layer first writes."""

    num_slots: int
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def write(
        self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores key and value [N, heads, head_size] at `slots` [N]. Returns all keys and values of
        the layer."""
        if layer not in self.layers:
            self.layers[layer] = (
                key.new_zeros(self.num_slots, *key.shape[1:]),
                value.new_zeros(self.num_slots, *value.shape[1:]),
            )
        keys, values = self.layers[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values


@dataclass
class QueryGroup:
    """The b requests of a step that compute q tokens each, so that one attention call suffices."""

    token_indices: torch.Tensor
    """[b,q] indices of these tokens in the step, all requests together."""
    positions: torch.Tensor
    """[b,q] positions of these tokens in their requests."""
    slots: torch.Tensor
    """[b,L] cache slots of positions 0 to L-1 of each request."""

    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def get_mask(self, window: int | None) -> torch.Tensor:
        """Returns the [b,1,q,L] causal attention mask, limited to `window` positions if given."""
        if window not in self.masks:
            key_positions = torch.arange(self.slots.shape[1], device=self.slots.device)
            distance = self.positions[..., None] - key_positions
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            self.masks[window] = visible[:, None]
        return self.masks[window]


@dataclass
class PagedStep:
    """The arguments of the attention in a step, which are the same for all layers."""

    cache: PagedKVCache
    slot_mapping: torch.Tensor
    """[N] cache slots of the step's tokens."""
    groups: list[QueryGroup]


def plan_step(
    cache: PagedKVCache,
    inputs: StepInputs,
    block_table: torch.Tensor,
    block_size: int,
    num_tokens: IntArray,
) -> PagedStep:
    """Plans the attention of a step without waiting for the device.

    The host knows the number of each request's tokens in the step, and an upper bound of each
    request's length (`inputs.upper_seq_lens`). Only the device knows the exact positions
    (`inputs.positions`): the attention reads KV slots up to the upper bound and masks later
    positions.

    Args:
        block_table: [request slots, blocks] KV block ids (`AsyncSpecState.block_tables`).
        num_tokens: [B] number of tokens of each request in the step.
    """
    device = block_table.device
    starts = np.cumsum(num_tokens) - num_tokens
    offsets = torch.arange(block_size, device=device)
    groups = []
    for count in np.unique(num_tokens):
        members = np.flatnonzero(num_tokens == count)
        num_blocks = -(-int(inputs.upper_seq_lens[members].max()) // block_size)
        token_indices = copy_to_device(starts[members, None] + np.arange(count), device)
        slot_indices = inputs.slot_indices[copy_to_device(members, device)].long()
        # -1 means no block: these positions are masked, so any block can be read.
        blocks = block_table[slot_indices, :num_blocks].long().clamp(min=0)
        slots = (blocks[..., None] * block_size + offsets).flatten(1)
        groups.append(QueryGroup(token_indices, inputs.positions[token_indices], slots))
    slot_mapping = inputs.slot_mappings[0][: inputs.num_step_tokens]
    return PagedStep(cache, slot_mapping, groups)


def copy_to_device(values: IntArray, device: torch.device) -> torch.Tensor:
    """Copies the values as int64 to the device; the host does not wait for the copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.int64))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged_step: PagedStep,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention for transformers, with query, key and value [1, heads, N, head_size]."""
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise NotImplementedError(
                f"paged_attention: {name}: expected None, got {options[name]!r:.60}"
            )
    keys, values = paged_step.cache.write(
        module.layer_idx,  # type: ignore[arg-type]
        paged_step.slot_mapping,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    queries = query[0].transpose(0, 1)
    outputs = values.new_empty(*queries.shape[:2], values.shape[-1])
    for group in paged_step.groups:
        output = torch.nn.functional.scaled_dot_product_attention(
            queries[group.token_indices].transpose(1, 2),
            keys[group.slots].transpose(1, 2),
            values[group.slots].transpose(1, 2),
            attn_mask=group.get_mask(sliding_window),
            scale=scaling,
            enable_gqa=True,
        )
        outputs[group.token_indices] = output.transpose(1, 2)
    return outputs[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class PagedModel:
    """Runs a model on the flat tokens of a step."""

    def __init__(self, model: PreTrainedModel, num_blocks: int, block_size: int) -> None:
        """
        Args:
            model: a causal LM in evaluation mode, its attention set to :data:`ATTENTION_NAME`.

        Raises:
            ValueError: the model does not use this attention.
        """
        attention = model.config._attn_implementation
        if attention != ATTENTION_NAME:
            raise ValueError(
                f"PagedModel: model: expected attention {ATTENTION_NAME!r}, got {attention!r}; "
                "use load() of this module, or set_attn_implementation() of the model"
            )
        self.model = model
        self.block_size = block_size
        self.cache = PagedKVCache(num_blocks * block_size)

    def forward(
        self,
        inputs: StepInputs,
        block_table: torch.Tensor,
        num_tokens: IntArray,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the step's tokens. Returns logits [L,V] at the flat positions `logit_indices`
        [L]. The other arguments are those of :func:`plan_step`."""
        step = plan_step(self.cache, inputs, block_table, self.block_size, num_tokens)
        num_step_tokens = inputs.num_step_tokens
        logits: torch.Tensor = self.model(
            input_ids=inputs.input_ids[None, :num_step_tokens],
            position_ids=inputs.positions[None, :num_step_tokens],
            use_cache=False,
            logits_to_keep=logit_indices,
            paged_step=step,
        ).logits
        return logits[0]


def load(folder: str, *, device: str = "cpu", dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Loads a model with paged attention from a local folder; nothing is downloaded."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder,
        attn_implementation=ATTENTION_NAME,
        dtype=dtype or "auto",
        local_files_only=True,
    )
    return model.eval().to(device)
