"""ngram_npu in vLLM: see docs/guides/vllm.md.

``speculative_config={"method": "custom_class",
"model": "ngram_npu.engines.vllm.NgramProposer", ...}``
"""

from ngram_npu.engines.vllm.v1_sync import NgramProposer

__all__ = ["NgramProposer"]
