"""vLLM's entry point into ngram_npu (group ``vllm.general_plugins``).

vLLM loads it in every process of every deployment that has it installed. So it is a
separate package: unless it is enabled, it imports nothing, not even ``ngram_npu``.
"""

import os

VARIABLE = "NGRAM_NPU_VLLM"
BESIDE = "NGRAM_NPU_VLLM_BESIDE"


def register() -> None:
    """Replaces vLLM's n-gram methods if ``NGRAM_NPU_VLLM=1``, which
    ``NGRAM_NPU_VLLM_BESIDE=1`` implies."""
    value = os.environ.get(VARIABLE, "")
    if not value and os.environ.get(BESIDE, "").lower() in ("1", "true"):
        value = "1"
    if value in ("", "0"):
        return
    if value != "1":
        import logging

        logging.getLogger("vllm.ngram_npu").warning(
            "ngram_npu: not enabled: %s: expected 0 or 1, got %r", VARIABLE, value
        )
        return
    from ngram_npu.engines.vllm.plugin import install

    install()
