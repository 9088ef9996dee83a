"""Over HTTP, a request that a store cannot separate from others' is the client's error (400), and
the server goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_runs import ENGINE, LADDER, METHODS, asynchronous
from http_server import Server
from openai import BadRequestError, OpenAI
from processes import SERVE

NAMED = {"vllm_xargs": {"ngram_npu_scope": "a"}}
SALT = {"cache_salt": "a"}


class Servers(NamedTuple):
    unscoped: Server
    """V1's ``ngram``, whose runner does not know whose a request is."""
    required: Server
    """V1's ``ngram_gpu`` with ``scope="required"``."""


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    methods = (
        METHODS["plugin"].speculative_config,
        asynchronous("padded", "auto").speculative_config,
    )
    stores: list[dict[str, Any]] = [{**LADDER, "store": "live"} for _ in methods]
    stores[1]["scope"] = "required"
    started = []
    with pytest.MonkeyPatch.context() as patched:
        paths = [str(SERVE.with_name("site")), str(SERVE.parent), os.environ.get("PYTHONPATH", "")]
        patched.setenv("PYTHONPATH", os.pathsep.join(paths))
        for speculative, store in zip(methods, stores, strict=True):
            options = {
                **ENGINE,
                "served_model_name": "tiny",
                "speculative_config": json.dumps(speculative),
                "additional_config": json.dumps({"ngram_npu": store}),
            }
            folder = tmp_path_factory.mktemp("server")
            started.append(Server(model, folder, options, NGRAM_NPU_VLLM="1"))
    try:
        for server in started:
            server.wait_until_ready()
        yield Servers(*started)
    finally:
        for server in started:
            server.stop()


def ask(server: Server, **more: Any) -> str:
    """The answer, or the message of error 400."""
    url = f"http://127.0.0.1:{server.port}/v1"
    with OpenAI(api_key="none", base_url=url, max_retries=0, timeout=120) as client:
        try:
            answer = client.completions.create(
                model="tiny", prompt=[5, 6, 7], max_tokens=4, temperature=0, extra_body=more
            )
        except BadRequestError as error:
            return str(error)
    return f"tokens: {answer.usage and answer.usage.completion_tokens}"


def test_misspelt_scope_is_error_400(servers: Servers) -> None:
    for server in servers:
        said = ask(server, vllm_xargs={"ngram_npu_scop": "a"}, **SALT)
        assert "ngram_npu: unknown key 'ngram_npu_scop' in extra_args" in said
        said = ask(server, vllm_xargs={"ngram_npu_scope": -1})
        assert "ngram_npu: ngram_npu_scope in extra_args" in said
        assert "got -1" in said


def test_owner_in_runner_without_scopes_is_error_400(servers: Servers) -> None:
    assert ask(servers.unscoped) == "tokens: 4"
    assert "ngram_npu: cache_salt: expected none" in ask(servers.unscoped, **SALT)
    assert "ngram_npu: ngram_npu_scope: expected none" in ask(servers.unscoped, **NAMED)
    assert ask(servers.unscoped) == "tokens: 4"
    log = servers.unscoped.log.read_text()
    assert "those with a cache_salt, a LoRA adapter or a scope are refused" in log


def test_missing_scope_is_error_400_where_required(servers: Servers) -> None:
    assert "ngram_npu: scope='required': expected a cache_salt" in ask(servers.required)
    assert ask(servers.required, **SALT) == "tokens: 4"
    assert ask(servers.required, **NAMED) == "tokens: 4"
    assert ask(servers.required, **NAMED, **SALT) == "tokens: 4"
    assert "those with none of the three are refused" in servers.required.log.read_text()
