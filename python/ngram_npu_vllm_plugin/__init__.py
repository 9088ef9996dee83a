"""Contains vLLM's entry point into ngram_npu (group ``vllm.general_plugins``).

vLLM loads this package in every process of every deployment that has it installed. So the package
is separate from ``ngram_npu``: unless the plugin is enabled, it does not import ``ngram_npu``.
"""

import functools
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

ENABLE_VARIABLE = "NGRAM_NPU_VLLM"
NEURAL_VARIABLE = "NGRAM_NPU_VLLM_NEURAL"
CONFIG_MODULE = "vllm.config.vllm"
logger = logging.getLogger("vllm.ngram_npu")


def register() -> None:
    """Replaces vLLM's n-gram methods if ``NGRAM_NPU_VLLM=1``, which
    ``NGRAM_NPU_VLLM_NEURAL=1`` implies."""
    value = os.environ.get(ENABLE_VARIABLE, "")
    if not value and os.environ.get(NEURAL_VARIABLE, "").lower() in ("1", "true"):
        value = "1"
    if value == "":
        _watch_configurations()
    elif value == "1":
        from ngram_npu.engines.vllm.plugin import install

        install()
    elif value != "0":
        logger.warning(
            "ngram_npu: not enabled: %s: expected 0 or 1, got %r", ENABLE_VARIABLE, value
        )


def _watch_configurations() -> None:
    """Makes vLLM warn once about options that have no effect because the plugin is not enabled.
    vLLM loads plugins before it creates its configuration."""
    config_class: Any = getattr(sys.modules.get(CONFIG_MODULE), "VllmConfig", None)
    stock = getattr(config_class, "__post_init__", None)
    if stock is None or hasattr(stock, "ngram_npu_plugin"):
        return

    @functools.wraps(stock)
    def validate(config: Any) -> None:
        stock(config)
        if _has_unused_options(config):
            _warn()

    validate.ngram_npu_plugin = True  # type: ignore[attr-defined]
    config_class.__post_init__ = validate


def _has_unused_options(config: Any) -> bool:
    additional_config = getattr(config, "additional_config", None)
    if not isinstance(additional_config, Mapping):
        return False
    sections = ("".join(filter(str.isalnum, str(name))).lower() for name in additional_config)
    # Our custom class reads its options without the plugin.
    model = str(getattr(getattr(config, "speculative_config", None), "model", ""))
    return any("ngramnpu" in name for name in sections) and not model.startswith("ngram_npu.")


@functools.cache
def _warn() -> None:
    logger.warning(
        "ngram_npu: the options in additional_config have no effect: expected %s=1, which enables "
        "the plugin, got no such variable",
        ENABLE_VARIABLE,
    )
