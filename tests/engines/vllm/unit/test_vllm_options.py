"""Tests from which sources options are read, and the error for each invalid option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from ngram_npu.engines.vllm.options import (
    OPTION_TYPES,
    REMOVED_OPTIONS,
    Options,
    has_options,
    read_options,
)
from vllm_config import make_vllm_config


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("NGRAM_NPU_VLLM", raising=False)
    return monkeypatch


def _read_options(method: Any, options: Any = None, **settings: Any) -> Options:
    section = {} if options is None else {"ngram_npu": options}
    return read_options(make_vllm_config(additional_config=section, **settings), method)


def test_options_without_settings_have_defaults(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("NGRAM_NPU_VLLM", "1")  # This variable enables the plugin; it is no option.
    options = _read_options("custom_class", k=3, max_model_len=77)
    config = options.ngram
    assert (config.min_n, config.max_n, config.k, config.max_len) == (1, 16, 3, 77)
    assert (config.match_policy, config.overlap, config.vocab_size) == ("latest", True, 32000)
    assert (options.lookup, options.num_threads, options.sources) == ("auto", 1, ())
    flags = options.store, options.metrics, options.keep_drafting
    assert (*flags, options.k, options.scope) == (False, False, False, "", "private")


SECTION = {"lookup": "ngram", "num_threads": 0, "metrics": True, "min_draft_probability": 0.5}


@pytest.mark.parametrize("source", ["additional_config['ngram_npu']", "the environment"])
def test_options_of_each_source_are_read(environment: pytest.MonkeyPatch, source: str) -> None:
    in_environment = source == "the environment"
    for name, value in SECTION.items() if in_environment else ():
        environment.setenv(f"NGRAM_NPU_VLLM_{name.upper()}", str(value))
    options = _read_options("custom_class", {} if in_environment else SECTION)
    assert (options.lookup, options.num_threads, options.metrics) == ("ngram", 0, True)
    assert options.ngram.min_draft_probability == 0.5
    assert options.sources == (source,)
    if in_environment:  # the section has precedence over the environment
        options = _read_options("custom_class", {"lookup": "auto"})
        assert options.lookup == "auto"
        assert options.sources == ("additional_config['ngram_npu']", "the environment")


def test_variables_that_are_no_options_are_ignored(environment: pytest.MonkeyPatch) -> None:
    """Kubernetes sets these for a service named ``ngram-npu-vllm``."""
    environment.setenv("NGRAM_NPU_VLLM_SERVICE_HOST", "10.0.0.1")
    for name in ("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_PROTO"):
        environment.setenv(f"NGRAM_NPU_VLLM_{name}", "tcp://10.0.0.1:80")
    assert _read_options("v2").sources == ()


# `expected`: min_n, max_n, match_policy, overlap, min_draft_probability.
@pytest.mark.parametrize(
    ("method", "section", "expected"),
    [
        ("v2", {}, (1, 16, "latest", True, None)),
        ("ngram_gpu", {}, (1, 16, "latest", True, None)),
        ("neural", {}, (1, 16, "latest", True, None)),
        ("ngram", {}, (1, 16, "latest", True, 0.12)),
        ("custom_class", {}, (1, 16, "latest", True, 0.12)),
        ("custom_class", {"min_draft_probability": 0.3}, (1, 16, "latest", True, 0.3)),
        ("ngram", {"min_draft_probability": None}, (1, 16, "latest", True, None)),
        ("ngram", {"lookup": "ngram"}, (3, 7, "earliest", False, None)),
        ("ngram_gpu", {"lookup": "ngram"}, (3, 7, "earliest", False, None)),
        ("v2", {"lookup": "ngram"}, (3, 7, "latest", False, None)),
        ("ascend_v2", {"lookup": "ngram"}, (3, 7, "earliest", False, None)),
        ("custom_class", {"lookup": "ngram"}, (2, 5, "earliest", False, None)),
    ],
)
def test_lookup_determines_n_grams_policy_and_probability(
    method: Any, section: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """vLLM drops ``prompt_lookup_*`` of a custom class."""
    config = _read_options(method, section, prompt_lookup_min=3, prompt_lookup_max=7).ngram
    policy = config.match_policy, config.overlap, config.min_draft_probability
    assert (config.min_n, config.max_n, *policy) == expected
    assert config.max_len == (None if method in ("v2", "ascend_v2", "neural") else 64)


@pytest.mark.parametrize(
    ("method", "section", "message"),
    [
        ("ngram", {"k": "auto"}, "k: expected only in the V2 runner, got 'auto'"),
        ("v2", {"k": "max"}, "k: expected one of auto, got 'max'"),
        ("v2", {"min_draft_probability": 0.3}, "this runner verifies num_speculative_tokens tok"),
        ("ngram_gpu", {"min_draft_probability": 0.3}, "min_draft_probability: expected none, be"),
        ("neural", {"lookup": "ngram"}, "lookup: expected 'auto' with a neural drafter"),
        ("v2", {"lookup": "ladder"}, "lookup: expected one of auto, ngram, got 'ladder'"),
        ("v2", {"lokup": "auto"}, "did you mean 'lookup'?"),
        ("v2", {"Store": True}, "did you mean 'store'?"),
        ("v2", {"num_speculative_tokens": 2}, "belongs in speculative_config"),
        ("v2", {"store": "live"}, "store in additional_config['ngram_npu']: expected bool, got 'l"),
        ("v2", {"metrics": 1}, "expected bool, got 1"),
        ("v2", {"num_threads": -1}, "num_threads: expected 0 or more, got -1"),
        ("ngram", {"min_draft_probability": "0.5"}, "expected float, got '0.5'"),
        ("ngram", {"min_draft_probability": True}, "expected float, got True"),
        ("v2", {"store_file": "x"}, "store_file: expected none without store=true"),
        ("v2", {"scope": "shared"}, "scope: expected none without store=true"),
        ("v2", {"store": True, "scope": "required"}, "scope: expected one of private, shared, got"),
        (
            "ngram",
            {"store": True},
            "scope: expected 'shared' with a store and 'ngram' in the V1",
        ),
        ("custom_class", {"store": True, "scope": "private"}, "scope: expected 'shared' with a st"),
        ("v2", {"store": True, "store_tokens": 2**28 + 1}, "store_tokens: expected at most 268435"),
        ("v2", "on", "expected a mapping of options, got 'on'"),
    ],
)
def test_invalid_section_raises_a_one_line_error(method: Any, section: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        _read_options(method, section)
    assert message in str(raised.value)
    assert str(raised.value).startswith("ngram_npu: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NUM_THREADS", "two", "NGRAM_NPU_VLLM_NUM_THREADS: expected int, got 'two'"),
        ("STORE", "live", "NGRAM_NPU_VLLM_STORE: expected bool, got 'live'"),
        ("MIN_DRAFT_PROBABILITY", "nan", "expected above 0, at most 1, got nan"),
    ],
)
def test_invalid_environment_raises_a_one_line_error(
    environment: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    environment.setenv(f"NGRAM_NPU_VLLM_{name}", value)
    test_invalid_section_raises_a_one_line_error("ngram", {}, message)


@pytest.mark.parametrize("name", REMOVED_OPTIONS)
def test_removed_option_raises_an_error_that_names_its_replacement(
    environment: pytest.MonkeyPatch, name: str
) -> None:
    assert name not in OPTION_TYPES
    for section in ({name: 1}, {}):
        if not section:
            environment.setenv(f"NGRAM_NPU_VLLM_{name.upper()}", "1")
        with pytest.raises(ValueError, match=f"^ngram_npu: {name} in .*: this option was removed"):
            _read_options("v2", section)


@pytest.mark.parametrize("method", ["v2", "ngram_gpu"])
def test_store_with_more_than_two_batches_in_flight_raises(method: Any) -> None:
    section = {"store": True, "scope": "shared"}
    config = make_vllm_config(additional_config={"ngram_npu": section})
    config.max_concurrent_batches = 2
    assert read_options(config, method).store
    config.max_concurrent_batches = 3
    with pytest.raises(ValueError, match="store: expected at most 2 batches in flight, got 3"):
        read_options(config, method)
    assert read_options(config, "ngram").store  # a synchronous runner


@pytest.mark.parametrize(
    "additional_config",
    [{name: {"lookup": "x"}} for name in ("other", "ngram", "npu", "ngram_config")] + [object()],
)
def test_additional_config_of_other_backends_is_ignored(additional_config: Any) -> None:
    config = make_vllm_config(additional_config=additional_config)
    assert read_options(config, "custom_class").sources == ()
    assert not has_options(config)


MISPLACED = [
    *(
        ({name: {"lookup": "auto"}}, rf"unknown section {name!r} in .*; did you mean 'ngram_npu'")
        for name in ("ngram-npu", "NGRAM_NPU", "ngram_npus", "ngam_npu", "ngram_npu_vllm")
    ),
    ({"store": True}, r"option 'store' at the top level of .*_config\['ngram_npu'\]\['store'\]\?"),
]


@pytest.mark.parametrize(("additional_config", "message"), MISPLACED)
def test_options_in_the_wrong_place_raise(additional_config: Any, message: str) -> None:
    config = make_vllm_config(additional_config=additional_config)
    assert has_options(config)
    with pytest.raises(ValueError, match=f"^ngram_npu: {message}"):
        read_options(config, "custom_class")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 65}, "num_speculative_tokens: expected 1 to 64, got 65"),
        ({"prompt_lookup_max": 65}, "prompt_lookup_max: expected 1 to 64, got 65"),
        ({"prompt_lookup_min": 9}, "prompt_lookup_min: expected 1 to 5, got 9"),
    ],
)
def test_invalid_setting_of_vllm_is_called_by_its_own_name(
    settings: dict[str, Any], message: str
) -> None:
    settings = {"prompt_lookup_min": 2, "prompt_lookup_max": 5, **settings}
    with pytest.raises(ValueError, match=f"^ngram_npu: {message}"):
        _read_options("ngram", {"lookup": "ngram"}, **settings)


def test_prompt_embeds_with_asynchronous_v1_raises() -> None:
    config = make_vllm_config()
    config.model_config.enable_prompt_embeds = True
    with pytest.raises(
        ValueError, match="ngram_npu: enable_prompt_embeds: expected false, got true"
    ):
        read_options(config, "ngram_gpu")
    for method in ("ngram", "custom_class", "v2", "ascend_v2", "neural"):
        read_options(config, method)


@pytest.mark.parametrize("name", ["is_hybrid", "has_inner_state"])
def test_drafting_is_kept_for_recurrent_models(name: str) -> None:
    config = make_vllm_config()
    for is_recurrent in (False, True):
        setattr(config.model_config, name, is_recurrent)
        assert read_options(config, "custom_class").keep_drafting == is_recurrent


def test_guide_lists_all_options() -> None:
    guide = Path(__file__).parents[4] / "docs" / "guides" / "vllm.md"
    table = guide.read_text().partition("| option (default) | meaning |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1].partition("(")[0] for line in table.splitlines()[2:]]
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(OPTION_TYPES)
