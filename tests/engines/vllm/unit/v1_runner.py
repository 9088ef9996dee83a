"""A stand-in for what vLLM's V1 runner keeps of requests, with what the plugin changes in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ngram_npu.engines.vllm import admission


class GPUModelRunner:
    """The states of requests have what vLLM's have: no ``cache_salt``."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}

    def _update_states(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            self.requests[new.req_id] = SimpleNamespace(
                lora_request=new.lora_request, sampling_params=new.sampling_params
            )


admission.install_v1(SimpleNamespace(GPUModelRunner=GPUModelRunner))
