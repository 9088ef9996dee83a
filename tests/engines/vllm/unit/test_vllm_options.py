"""Tests from which sources options are read, and the error for each invalid option."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ngram_npu.config import MAX_DRAFT_TOKENS
from ngram_npu.engines.vllm import options
from ngram_npu.engines.vllm.options import Options, read_options, vocabulary_digest
from ngram_npu.store import tokenizer_digest
from ngram_npu_cli.learn.fit_draft_costs import fit
from vllm_config import make_vllm_config


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("NGRAM_NPU_VLLM", raising=False)
    return monkeypatch


def _read_options(method: Any, options: Any = None, **settings: Any) -> Options:
    section = {} if options is None else {"ngram_npu": options}
    return read_options(make_vllm_config(additional_config=section, **settings), method)


def _read_section(**options: Any) -> Options:
    return _read_options("custom_class", options)


def _get_bounds(options: Options) -> tuple[int, int]:
    return options.ngram.min_n, options.ngram.max_n


def test_options_without_settings_have_defaults(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("NGRAM_NPU_VLLM", "1")  # This variable enables the plugin; it is no option.
    options = _read_options("custom_class", k=3, max_model_len=77)
    config = options.ngram
    assert (config.min_n, config.max_n, config.k, config.max_len) == (2, 5, 3, 77)
    assert (config.match_policy, config.overlap) == ("earliest", False)
    assert (options.engine, options.num_threads, options.sources) == ("auto", 1, ())


SECTION = {
    "prompt_lookup_min": 3,
    "prompt_lookup_max": 6,
    "match_policy": "latest",
    "overlap": True,
    "engine": "scan",
    "num_threads": 0,
}


@pytest.mark.parametrize("source", ["additional_config['ngram_npu']", "the environment"])
def test_options_of_each_source_are_read(environment: pytest.MonkeyPatch, source: str) -> None:
    in_environment = source == "the environment"
    for name, value in SECTION.items() if in_environment else ():
        environment.setenv(f"NGRAM_NPU_VLLM_{name.upper()}", str(value))
    options = _read_section(**({} if in_environment else SECTION))
    assert _get_bounds(options) == (3, 6)
    assert (options.ngram.match_policy, options.ngram.overlap) == ("latest", True)
    assert (options.engine, options.num_threads, options.sources) == ("scan", 0, (source,))
    if in_environment:  # the section has precedence over the environment
        options = _read_section(prompt_lookup_max=4)
        assert _get_bounds(options) == (3, 4)
        assert options.sources == ("additional_config['ngram_npu']", "the environment")


MIN_UNLIMITED_COST = MAX_DRAFT_TOKENS * 255
"""The lowest cost limit that shortens no draft."""


# The method "beside" combines n-grams with a neural drafter.
@pytest.mark.parametrize("method", ["custom_class", "ngram", "ngram_gpu", "v2", "beside"])
@pytest.mark.parametrize(("probability", "limit"), [(None, None), (0.177, 40), (1, 0)])
def test_ladder_determines_n_gram_lengths_and_cost_limit(
    environment: pytest.MonkeyPatch, method: Any, probability: Any, limit: int | None
) -> None:
    """vLLM always sets prompt_lookup_*, which have no effect with a ladder."""
    settings = {"prompt_lookup_min": 3, "prompt_lookup_max": 40}
    section = {"lookup": "ladder", "min_draft_probability": probability}
    ngram = _read_options(method, section, **settings).ngram
    assert (ngram.is_ladder, ngram.min_n, ngram.max_n) == (True, 1, 16)
    assert (ngram.match_policy, ngram.overlap) == ("latest", True)
    if limit is None or method in ("custom_class", "ngram"):
        assert ngram.cost_limit == limit
    else:
        assert MIN_UNLIMITED_COST <= ngram.cost_limit < 2**31
    for text, cost_limit in (("0.177", 40), ("none", None)):
        environment.setenv("NGRAM_NPU_VLLM_MIN_DRAFT_PROBABILITY", text)
        options = _read_options(method, {"lookup": "ladder", "overlap": False}, **settings)
        assert not options.ngram.overlap
        assert (options.min_draft_probability is None) == (cost_limit is None)
        if method == "ngram":
            assert options.ngram.cost_limit == cost_limit


@pytest.mark.parametrize(("share", "expected"), [(0.01, 0.0343), (0.05, 0.137), (0.1, 0.248)])
def test_token_cost_determines_min_draft_probability(share: float, expected: float) -> None:
    for section in ({"lookup": "ladder"}, {"lookup": "auto"}):
        options = _read_options("ngram", {**section, "token_cost": share})  # of the step's time
        assert options.ngram.min_draft_probability == pytest.approx(expected, rel=0.01)
    assert options.lookup == "ladder"


@pytest.mark.parametrize(
    ("method", "section", "message"),
    [
        ("ngram", {"token_cost": 1.5}, "token_cost: expected 0 to 1.0, got 1.5"),
        ("ngram", {"token_cost": 0.1, "min_draft_probability": 0.2}, "token_cost: expected none"),
        ("ngram", {"k": "auto"}, "k: expected only in the V2 runner, got 'auto'; in the V1 runner"),
        ("ngram_gpu", {"k": "auto"}, "with token_cost, the cost of a token"),
        ("v2", {"k": "max"}, "k: expected one of auto, got 'max'"),
        (
            "v2",
            {"step_times_file": "a"},
            "expected none without k='auto': this runner verifies num_",
        ),
        (
            "ngram_gpu",
            {"step_times_file": "a"},
            "this runner verifies num_speculative_tokens tokens",
        ),
        (
            "ngram",
            {"step_times_file": "a", "lookup": "1-16"},
            "step_times_file: expected none without k='auto': only drafts of lookup='ladder' end "
            "by their cost, got '1-16'",
        ),
        ("ngram", {"step_times_file": "/no/file"}, "step_times_file: /no/file: not a file of step"),
        ("v2", {"k": "auto", "step_times_file": "/no/file"}, "step_times_file: /no/file: not a fi"),
    ],
)
def test_invalid_draft_length_options_raise(
    method: Any, section: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        _read_options(method, {"lookup": "ladder", **section})
    assert message in str(error.value)


def write_step_times(path: Path) -> str:
    """Writes a file of step times for 2, 8 and 64 requests. In these steps, a draft token adds 1, 5
    and 40 % to the time of a step without drafts."""
    steps = [
        {"batch": batch, "verified": batch * (1 + k), "seconds": 0.01 * (1 + cost * k)}
        for batch, cost in ((2, 0.01), (8, 0.05), (64, 0.4))
        for k in (0, 4)
    ]
    path.write_text(json.dumps({"format": "ngram_npu.cost/1", "steps": steps}))
    return str(path)


@pytest.mark.parametrize(
    ("max_num_seqs", "batch", "cost"),
    [(1, 2, 0.01), (2, 2, 0.01), (7, 2, 0.01), (8, 8, 0.05), (63, 8, 0.05), (256, 64, 0.4)],
)
def test_step_times_determine_min_draft_probability(
    tmp_path: Path, max_num_seqs: int, batch: int, cost: float
) -> None:
    section: dict[str, Any] = {"step_times_file": write_step_times(tmp_path / "cost.json")}
    expected = pytest.approx(options.convert_cost_to_probability(cost))
    for method, more_options, is_adaptive in (
        ("ngram", {"lookup": "ladder"}, False),
        ("custom_class", {"lookup": "auto"}, False),
        ("ngram_gpu", {"lookup": "ladder", "drafts": "trimmed"}, False),
        ("v2", {"lookup": "ladder"}, True),
        ("v2", {"lookup": "ladder", "k": "auto"}, True),
    ):
        arguments: dict[str, Any] = {"max_num_seqs": max_num_seqs, "k": 8}
        arguments["enable_adaptive_verification"] = is_adaptive
        result: Any = _read_options(method, {**section, **more_options}, **arguments)
        assert result.ngram.min_draft_probability == expected
        assert result.step_times_batch == batch


@pytest.mark.parametrize(
    ("more_options", "expected"),
    [
        ({"token_cost": 0.02}, options.convert_cost_to_probability(0.02)),
        ({"min_draft_probability": 0.3}, 0.3),
        ({"min_draft_probability": None}, None),
    ],
)
def test_configured_probability_has_precedence_over_step_times(
    tmp_path: Path, more_options: dict[str, Any], expected: float | None
) -> None:
    section = {"lookup": "auto", "step_times_file": write_step_times(tmp_path / "cost.json")}
    result = _read_options("ngram", {**section, **more_options})
    assert result.ngram.min_draft_probability == expected
    assert result.step_times_batch == 0


def test_step_times_with_k_auto_and_no_ladder_are_used_only_to_choose_k(tmp_path: Path) -> None:
    section = {"k": "auto", "step_times_file": write_step_times(tmp_path / "cost.json")}
    result = _read_options("v2", {"lookup": "1-16", **section})
    assert (result.ngram.min_draft_probability, result.step_times_batch) == (None, 0)
    assert result.step_times is not None
    relative_times_for = result.step_times.make_relative_times([0, 4])  # for k of 0 or 4
    assert relative_times_for(8)[4] == pytest.approx(1.2), "expected the times of batch size 8"
    assert _read_options("v2", {"lookup": "1-16", "k": "auto"}).step_times is None


def test_additional_config_of_other_backends_is_ignored() -> None:
    config = make_vllm_config(additional_config={"other_backend": {"prompt_lookup_min": "x"}})
    assert read_options(config, "custom_class").sources == ()
    assert read_options(make_vllm_config(additional_config=object()), "custom_class").sources == ()


@pytest.mark.parametrize("name", ["ngram-npu", "ngramnpu", "NGRAM_NPU"])
def test_misspelled_section_raises(name: str) -> None:
    config = make_vllm_config(additional_config={name: {"engine": "scan"}})
    message = f"^ngram_npu: unknown section {name!r} in additional_config; did you mean 'ngram_npu"
    with pytest.raises(ValueError, match=message):
        read_options(config, "custom_class")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"prompt_lokup_min": 2}, "did you mean 'prompt_lookup_min'?"),
        ({"Engine": "scan"}, "did you mean 'engine'?"),
        ({"num_speculative_tokens": 2}, "belongs in speculative_config"),
        ({"prompt_lookup_min": "2"}, "prompt_lookup_min in additional_config['ngram_npu']: expec"),
        ({"overlap": 1}, "expected bool, got 1"),
        ({"prompt_lookup_min": 4, "prompt_lookup_max": 3}, "is greater than prompt_lookup_max=3"),
        ({"engine": "magic"}, "engine: expected 'index', 'scan' or 'auto', got 'magic'"),
        (
            {"engine": "index", "prompt_lookup_min": 2, "prompt_lookup_max": 10},
            "engine: expected max_n - min_n <= 7, and no min_draft_probability without a ladder, "
            "for 'index', got 2 to 10 (min_n, max_n, k: ",
        ),
        ({"num_threads": -1}, "num_threads: expected 0 or more, got -1"),
        ({"min_draft_probability": "0.5"}, "expected float, got '0.5'"),
        ({"min_draft_probability": True}, "expected float, got True"),
        ({"store_file": "x"}, "store_file: expected none without a store"),
        ({"store_save_minutes": -1}, "store_save_minutes: expected 0 to 1000000, got -1"),
        ({"scope": "required"}, "scope: expected none without a store"),
        (
            {"lookup": "auto", "store": "live", "scope": "required"},
            "scope: expected 'shared', got 'required': with 'custom_class'",
        ),
        ("on", "expected a mapping of options, got 'on'"),
    ],
)
def test_invalid_section_raises_a_one_line_error(section: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        _read_options("custom_class", section)
    assert message in str(raised.value)
    assert str(raised.value).startswith("ngram_npu: ")
    assert "\n" not in str(raised.value)


def test_prompt_embeds_with_asynchronous_v1_raises() -> None:
    config = make_vllm_config(prompt_lookup_min=2, prompt_lookup_max=4)
    config.model_config.enable_prompt_embeds = True
    with pytest.raises(
        ValueError, match="ngram_npu: enable_prompt_embeds: expected false, got true"
    ):
        read_options(config, "ngram_gpu")
    for method in ("ngram", "custom_class", "v2", "ascend_v2", "beside"):
        read_options(config, method)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PROMPT_LOOKUP", "2", "unknown option 'prompt_lookup' in the environment"),
        ("PROMPT_LOOKUP_MIN", "two", "NGRAM_NPU_VLLM_PROMPT_LOOKUP_MIN: expected int, got 'two'"),
        ("OVERLAP", "maybe", "NGRAM_NPU_VLLM_OVERLAP: expected bool, got 'maybe'"),
        ("MIN_DRAFT_PROBABILITY", "nan", "expected above 0, at most 1, got nan"),
    ],
)
def test_invalid_environment_raises_a_one_line_error(
    environment: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    environment.setenv(f"NGRAM_NPU_VLLM_{name}", value)
    test_invalid_section_raises_a_one_line_error({}, message)


def test_options_of_method_beside_are_read(environment: pytest.MonkeyPatch) -> None:
    options = _read_options("beside")
    assert _get_bounds(options) == (2, 16)
    ngram = options.ngram
    assert (ngram.match_policy, ngram.overlap, ngram.max_len) == ("latest", True, None)
    assert (options.beside, options.beside_threshold, options.dense_rows) == (True, 0, True)
    assert not _read_options("custom_class").beside
    environment.setenv("NGRAM_NPU_VLLM_OVERLAP", "0")
    environment.setenv("NGRAM_NPU_VLLM_BESIDE_THRESHOLD", "1.5")
    environment.setenv("NGRAM_NPU_VLLM_DENSE_ROWS", "0")
    options = _read_options("beside")
    assert not options.ngram.overlap
    assert (options.beside_threshold, options.dense_rows) == (1.5, False)


def test_lookup_that_contradicts_speculative_config_raises(environment: pytest.MonkeyPatch) -> None:
    settings = {"prompt_lookup_min": 3, "prompt_lookup_max": 7}
    options = _read_options("ngram", {"prompt_lookup_min": 3, "match_policy": "latest"}, **settings)
    assert (*_get_bounds(options), options.ngram.match_policy) == (3, 7, "latest")
    environment.setenv("NGRAM_NPU_VLLM_PROMPT_LOOKUP_MAX", "9")
    with pytest.raises(ValueError, match="contradicts speculative_config, which decides"):
        _read_options("ngram", **settings)


@pytest.mark.parametrize("name", ["is_hybrid", "has_inner_state"])
def test_keep_drafting_is_on_by_default_for_recurrent_models(name: str) -> None:
    config = make_vllm_config()
    for is_recurrent, section, expected in (
        (False, {}, False),
        (True, {}, True),
        (True, {"keep_drafting": False}, False),
    ):
        setattr(config.model_config, name, is_recurrent)
        config.additional_config = {"ngram_npu": section}
        assert read_options(config, "custom_class").keep_drafting == expected


# `expected`: lookup, min_n, max_n, match_policy, overlap, min_draft_probability.
@pytest.mark.parametrize(
    ("method", "section", "expected"),
    [
        ("custom_class", {"lookup": "1-16"}, ("1-16", 1, 16, "latest", True, None)),
        ("ngram", {"lookup": "1-16", "overlap": False}, ("1-16", 1, 16, "latest", False, None)),
        ("v2", {"lookup": "ladder"}, ("ladder", 1, 16, "latest", True, None)),
        ("v2", {}, ("ngram", 3, 7, "latest", False, None)),
        ("v2", {"match_policy": "earliest"}, ("ngram", 3, 7, "earliest", False, None)),
        ("v2", {"lookup": "auto"}, ("1-16", 1, 16, "latest", True, None)),
        ("ngram_gpu", {"lookup": "auto"}, ("1-16", 1, 16, "latest", True, None)),
        (
            "ngram_gpu",
            {"lookup": "auto", "drafts": "trimmed"},
            ("ngram", 3, 7, "earliest", False, None),
        ),
        ("beside", {"lookup": "auto"}, ("1-16", 1, 16, "latest", True, None)),
        ("ngram", {"lookup": "auto"}, ("ladder", 1, 16, "latest", True, 0.177)),
        ("custom_class", {"lookup": "auto"}, ("ladder", 1, 16, "latest", True, 0.177)),
        (
            "custom_class",
            {"lookup": "auto", "min_draft_probability": 0.3},
            ("ladder", 1, 16, "latest", True, 0.3),
        ),
        ("v2", {"lookup": "auto", "store": "live"}, ("ladder", 1, 16, "latest", True, 0.177)),
    ],
)
def test_lookup_option_determines_bounds_policy_and_probability(
    method: Any, section: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    """The option overrides prompt_lookup_* of speculative_config."""
    options = _read_options(method, section, prompt_lookup_min=3, prompt_lookup_max=7)
    ngram = options.ngram
    policy = ngram.match_policy, ngram.overlap, options.min_draft_probability
    assert (options.lookup, *_get_bounds(options), *policy) == expected
    ignored_bounds = "" if options.lookup == "ngram" else "prompt_lookup_min=3 prompt_lookup_max=7"
    assert options.ignored_bounds == ignored_bounds
    assert ngram.max_len == (None if method in ("v2", "beside") else 64)


@pytest.mark.parametrize("name", ["prompt_lookup_min", "prompt_lookup_max"])
def test_bounds_of_a_custom_class_are_read_as_options(name: str) -> None:
    assert _get_bounds(_read_section(**{name: 3})) == (3, 3)
    options = _read_section(**{"lookup": "1-16", name: 4})
    assert _get_bounds(options) == (1, 16)
    assert options.ignored_bounds == f"{name}=4"


@pytest.mark.parametrize("digest", ["a" * 32, None, "b" * 32])
def test_costs_file_is_loaded_unless_it_is_for_another_tokenizer(
    digest: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "costs.json")
    costs = fit([], "a" * 32)
    costs.save(path)
    monkeypatch.setattr(options, "vocabulary_digest", lambda model_config: digest)
    section = {"costs_file": path, "lookup": "ladder", "min_draft_probability": 0.2}
    if digest == "b" * 32:
        with pytest.raises(ValueError, match=r"ngram_npu: Costs: .*expected costs for tokenizer b"):
            _read_section(**section)
        return
    assert _read_section(**section).ngram.costs == costs
    with pytest.raises(ValueError, match=r"ngram_npu: .*costs: expected None with sizes="):
        _read_section(costs_file=path)


def test_vocabulary_digest_ignores_the_order_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 1})
    module = SimpleNamespace(cached_tokenizer_from_config=lambda model_config: tokenizer)
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", module)
    assert vocabulary_digest(SimpleNamespace()) == tokenizer_digest({"b": 1, "a": 0})
    assert vocabulary_digest(SimpleNamespace(skip_tokenizer_init=True)) is None
    assert tokenizer_digest({"a": 0, "b": 2}) != tokenizer_digest({"a": 0, "b": 1})
