"""Contains vLLM's entry point into ngram_npu (group ``vllm.general_plugins``).

vLLM loads this package in every process of every deployment that has it installed. So the package
is separate from ``ngram_npu``: unless the plugin is enabled, it does not import ``ngram_npu``.
"""

import os

ENABLE_VARIABLE = "NGRAM_NPU_VLLM"
BESIDE_VARIABLE = "NGRAM_NPU_VLLM_BESIDE"


def register() -> None:
    """Replaces vLLM's n-gram methods if ``NGRAM_NPU_VLLM=1``, which
    ``NGRAM_NPU_VLLM_BESIDE=1`` implies."""
    value = os.environ.get(ENABLE_VARIABLE, "")
    if not value and os.environ.get(BESIDE_VARIABLE, "").lower() in ("1", "true"):
        value = "1"
    if value in ("", "0"):
        return
    if value != "1":
        import logging

        logging.getLogger("vllm.ngram_npu").warning(
            "ngram_npu: not enabled: %s: expected 0 or 1, got %r", ENABLE_VARIABLE, value
        )
        return
    from ngram_npu.engines.vllm.plugin import install

    install()
