"""Contains the drafters for vLLM (docs/guides/vllm.md). vLLM loads the custom class with

``speculative_config={"method": "custom_class",
"model": "ngram_npu.engines.vllm.NgramProposer", ...}``
"""

from ngram_npu.engines.vllm.v1 import NgramProposer

__all__ = ["NgramProposer"]
