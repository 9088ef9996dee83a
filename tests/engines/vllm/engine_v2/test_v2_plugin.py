"""The plugin on the modules of the vLLM that is installed.

`python -m tools.engines newest --runner v2 -- tests/engines/vllm/engine_v2/test_v2_plugin.py` runs
this on the sources of the newest release.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

MODULES = """
import importlib, json, logging
from ngram_npu.engines.vllm import plugin
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logger = logging.getLogger("vllm.ngram_npu")
logger.setLevel(logging.DEBUG)
logger.addHandler(handler)
plugin.install()
def member(module, *names):
    found = importlib.import_module(module)
    for name in names:
        found = getattr(found, name)
    return found
importlib.import_module(plugin.V2_RUNNER)  # first, as in a worker
speculator = member(plugin.V2_MODULE, plugin.V2_CLASS)
wrapped = [
    member(plugin.CONFIG, "VllmConfig", "__post_init__"),
    member(plugin.V2_RUNNER, plugin.V2_FACTORY),
    member(plugin.V2_RUNNER, "GPUModelRunner", "add_requests"),
]
print(json.dumps({
    "lines": lines,
    "served": [
        member(plugin.MODULE, plugin.CLASS).__module__,
        member(plugin.RUNNER, plugin.ASYNC_CLASS).__module__,
        speculator.__module__,
    ],
    "abstract": sorted(speculator.__abstractmethods__),
    "wrapped": [hasattr(function, "ngram_npu") for function in wrapped],
}))
"""

CONFIG = """
import sys
from vllm.engine.arg_utils import EngineArgs
EngineArgs(
    model=sys.argv[1],
    speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    additional_config={"ngram_npu": {"lokup": "1-16"}},
).create_engine_config()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_plugin_serves_all_methods_of_the_installed_vllm() -> None:
    done = run(MODULES)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert [line for line in found["lines"] if "not enabled" in line] == []
    modules = ["v1_sync", "v1_device", "v2"]
    assert found["served"] == [f"ngram_npu.engines.vllm.{module}" for module in modules]
    assert found["abstract"] == []
    assert found["wrapped"] == [True] * 3


def test_unknown_option_is_an_error_before_an_engine_starts(model: Path) -> None:
    done = run(CONFIG, str(model), NGRAM_NPU_VLLM="1")
    assert done.returncode != 0
    assert "ngram_npu: unknown option 'lokup'" in done.stderr
    assert "did you mean 'lookup'?" in done.stderr
    assert run(CONFIG, str(model), NGRAM_NPU_VLLM="0").returncode == 0  # without the plugin
