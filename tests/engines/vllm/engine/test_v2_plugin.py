"""Tests the plugin on the modules of the installed vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

INSTALL_SCRIPT = """
import importlib, json, logging
from ngram_npu.engines.vllm import plugin
logger = logging.getLogger("vllm.ngram_npu")
logger.setLevel(logging.DEBUG)
logger.addHandler(logging.StreamHandler())
plugin.install()
def resolve(module, *names):
    member = importlib.import_module(module)
    for name in names:
        member = getattr(member, name)
    return member
importlib.import_module(plugin.V2_RUNNER)  # first, as in a worker
speculator = resolve(plugin.V2_MODULE, plugin.V2_CLASS)
wrapped = [
    resolve(plugin.CONFIG, "VllmConfig", "__post_init__"),
    resolve(plugin.V2_RUNNER, plugin.V2_FACTORY),
    resolve(plugin.V2_RUNNER, "GPUModelRunner", "add_requests"),
    resolve(plugin.request_scopes.INPUT_MODULE, "InputProcessor", "process_inputs"),
    resolve(plugin.request_scopes.ENGINE_MODULE, "AsyncLLM", "generate"),
]
print(json.dumps({
    "replaced": [
        resolve(plugin.MODULE, plugin.CLASS).__module__,
        resolve(plugin.RUNNER, plugin.ASYNC_CLASS).__module__,
        speculator.__module__,
    ],
    "abstract": sorted(speculator.__abstractmethods__),
    "wrapped": [hasattr(function, "ngram_npu") for function in wrapped],
}))
"""

CONFIG_SCRIPT = """
import sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(
    model=sys.argv[1],
    speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    additional_config={"ngram_npu": {"lokup": "auto"}},
).create_engine_config()
"""


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_plugin_replaces_ngram_classes_of_installed_vllm() -> None:
    process = run_script(INSTALL_SCRIPT)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    assert "ngram_npu: enabled for" in process.stderr
    assert "not enabled" not in process.stderr
    modules = ["v1", "v1", "v2"]
    assert result["replaced"] == [f"ngram_npu.engines.vllm.{module}" for module in modules]
    assert result["abstract"] == []
    assert result["wrapped"] == [True] * 5


def test_unknown_option_raises_before_an_engine_starts(model: Path) -> None:
    process = run_script(CONFIG_SCRIPT, str(model), NGRAM_NPU_VLLM="1")
    assert process.returncode != 0
    assert "ngram_npu: unknown option 'lokup'" in process.stderr
    assert "did you mean 'lookup'?" in process.stderr
    for value in ("0", ""):  # without the plugin
        process = run_script(CONFIG_SCRIPT, str(model), NGRAM_NPU_VLLM=value)
        assert process.returncode == 0
        message = "ngram_npu: the options in additional_config have no effect: expected NGRAM_NPU_V"
        assert process.stdout.count(message) == (value == "")
