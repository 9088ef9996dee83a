"""Where drafts are made: what the model verifies there, how vLLM is told, and what it costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SYNCHRONOUS = 0.1
"""What a step takes longer without asynchronous scheduling, as a share of it: an assumption. Others
measured 6 % with 32B parameters and 20 % with 7B (the table of vllm-ascend's pull request that
makes its runner asynchronous)."""


@dataclass(frozen=True)
class Runner:
    """One way of drafting in a server.

    Attributes:
        name: for `--runner`.
        drafts: what is verified, as in `ReplayOptions`.
        method: of vLLM's `speculative_config`.
        variables: of the server's environment.
        is_synchronous: whether vLLM then schedules synchronously.
        about: where it drafts, and what it takes away.
    """

    name: str
    drafts: Literal["padded", "trimmed"]
    method: Literal["ngram_gpu", "custom_class", "ngram"]
    variables: tuple[str, ...]
    is_synchronous: bool
    about: str


RUNNERS = {
    of.name: of
    for of in (
        Runner(
            "gpu",
            "padded",
            "ngram_gpu",
            ("NGRAM_NPU_VLLM=1",),
            False,
            "drafts on the GPU (ngram_gpu). Keeps the V2 runner and asynchronous scheduling; all "
            "K tokens are verified. A store there (draft_on) is not searched.",
        ),
        Runner(
            "host",
            "trimmed",
            "custom_class",
            ("NGRAM_NPU_VLLM=1",),  # which a store needs
            True,
            "drafts on the host (custom_class). On a GPU this TAKES AWAY the V2 runner and "
            "asynchronous scheduling.",
        ),
        Runner(
            "ascend",
            "trimmed",
            "ngram",
            ("NGRAM_NPU_VLLM=1", "VLLM_USE_V2_MODEL_RUNNER=0"),
            True,
            "drafts on the host beside vLLM-Ascend (ngram, from v0.24.0rc). This TAKES AWAY "
            "asynchronous scheduling.",
        ),
    )
}
