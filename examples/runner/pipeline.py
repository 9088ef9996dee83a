"""Pipeline parallelism: the layers of a model are divided among processes (stages).

Every stage runs the same runner with the same requests, so all stages schedule the same steps. Only
the last stage has logits. It sends the sampled tokens of each step to the other stages, which then
know as much as the last stage: they append the tokens and draft alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed
from transformers import PreTrainedModel


class Pipeline:
    """The communication of a stage. All stages make the same calls in the same order.

    With NCCL, use one group for each direction: a stage receives the tokens of a step while it may
    already receive the hidden states of the next one.
    """

    def __init__(self, hidden_group: Any = None, token_group: Any = None) -> None:
        """
        Args:
            hidden_group, token_group: groups for hidden states and for sampled tokens, with the
                same processes in the order of the stages; None: the default group.
        """
        self._hidden_group, self._token_group = hidden_group, token_group
        self.stage = distributed.get_rank(hidden_group)
        self.num_stages = distributed.get_world_size(hidden_group)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Sends hidden states to the next stage."""
        distributed.send(hidden, group=self._hidden_group, group_dst=self.stage + 1)

    def receive_hidden(self, hidden: torch.Tensor) -> None:
        """Fills `hidden` with the hidden states of the stage before."""
        distributed.recv(hidden, group=self._hidden_group, group_src=self.stage - 1)

    def share_tokens(self, tokens: torch.Tensor) -> None:
        """Fills `tokens` with the last stage's tokens."""
        source = self.num_stages - 1
        distributed.broadcast(tokens, group=self._token_group, group_src=source)


def keep_layers_of_stage(model: PreTrainedModel, pipeline: Pipeline) -> None:
    """Removes the layers of other stages. A stage before the last returns hidden states as logits.

    The model must have the structure of Llama: `model.layers`, `model.norm` and `lm_head`.
    """
    decoder: Any = model.model
    count = len(decoder.layers)
    begin, end = (count * n // pipeline.num_stages for n in (pipeline.stage, pipeline.stage + 1))
    decoder.layers = decoder.layers[begin:end]
    if not pipeline.is_last:
        decoder.norm = model.lm_head = torch.nn.Identity()
