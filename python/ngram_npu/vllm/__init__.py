"""ngram_npu in vLLM: see docs/guides/vllm.md.

``speculative_config={"method": "custom_class", "model": "ngram_npu.vllm.NgramProposer", ...}``
"""

from ngram_npu.vllm.v1_host import NgramProposer

__all__ = ["NgramProposer"]
