"""vLLM's entry point into ngram_npu (group ``vllm.general_plugins``).

vLLM loads it in every process of every deployment beside which the package is installed, so that
it is a package of its own: until it is asked for, it imports nothing, not even ``ngram_npu``.
"""

import os

VARIABLE = "NGRAM_NPU_VLLM"


def register() -> None:
    """Serves vLLM's ``method="ngram"`` with ngram_npu where ``NGRAM_NPU_VLLM=1``, else nothing."""
    wish = os.environ.get(VARIABLE, "")
    if wish in ("", "0"):
        return
    if wish != "1":
        import logging

        logging.getLogger("vllm.ngram_npu").warning(
            "ngram_npu: not enabled: %s=%r is neither 0 nor 1", VARIABLE, wish
        )
        return
    from ngram_npu.vllm.plugin import install

    install()
