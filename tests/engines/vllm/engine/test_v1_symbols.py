"""Tests which classes and functions of the installed vLLM the plugin replaces, for both runners. No
engine runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ngram_npu.engines.vllm.patching import SYMBOLS

SCRIPT = """
import importlib, inspect, json, pathlib, sys
import ngram_npu
from ngram_npu.engines.vllm import patching, plugin

folder = str(pathlib.Path(ngram_npu.__file__).parent)
plugin.install()
waiting = [finder.name for finder in sys.meta_path if isinstance(finder, patching._AfterImport)]
for name in waiting:
    importlib.import_module(name)
importlib.import_module("vllm.v1.engine.core")

def is_ours(value):
    if isinstance(value, classmethod):
        value = value.__func__
    if inspect.isclass(value):
        return value.__module__.startswith("ngram_npu")
    return inspect.isfunction(value) and value.__code__.co_filename.startswith(folder)

symbols = set()
for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "vllm"]:
    for name, value in list(vars(module).items()):
        if is_ours(value):
            symbols.add(name)
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            symbols |= {f"{name}.{key}" for key, item in vars(value).items() if is_ours(item)}
print("symbols:", json.dumps(sorted(symbols)))
"""


def test_plugin_replaces_exactly_the_declared_symbols() -> None:
    environment = {**os.environ, "NGRAM_NPU_VLLM": "1", "NGRAM_NPU_VLLM_CORRECTION": "1"}
    arguments = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(arguments, env=environment, check=True, capture_output=True, text=True)
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("symbols: ")]
    assert json.loads(line.removeprefix("symbols: ")) == sorted(SYMBOLS)
