"""Tests that `drafting` does not change the output of `model.generate`, or that the call raises an
error with the reason. The tests cover all arguments and options of the installed transformers."""

from __future__ import annotations

import importlib.metadata
import inspect
import random
import re
import runpy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramStore

pytest.importorskip("transformers")

import ngram_npu.engines.transformers as adapter
import tiny_model
import transformers
import transformers_models as models
from ngram_npu.engines.transformers import drafting
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    TextStreamer,
)

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/transformers.md"
K = 5
NEW_TOKENS = 24
NEWLINE = ord("\n")
PROMPT = b"> read(a41)\nread(a41) ok\n> find(c70)\nfind(c70) no\n> read(a4"
PROMPT_IDS = torch.tensor([list(PROMPT)])
WITH_SAMPLING = {"do_sample": True}
WITH_DICT = {"return_dict_in_generate": True}


def make_supported_options(greedy: list[int]) -> dict[str, dict[str, Any]]:
    """Returns options that set each supported field of a generation config.

    Args:
        greedy: the greedy output, from which tokens are chosen so that the options have an effect.
    """
    length = PROMPT_IDS.shape[1]
    end_tokens = {"eos_token_id": [greedy[3], greedy[12]]}
    return {
        "bad_words_ids": {"bad_words_ids": [[greedy[4]], [greedy[1], greedy[2]]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [greedy[0]]},
        "bos_token_id": {"bos_token_id": 5},
        "decoder_start_token_id": {"decoder_start_token_id": 5},
        "disable_compile": {"disable_compile": True},
        "do_sample": WITH_SAMPLING,
        "early_stopping": {"early_stopping": True},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 3},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.2},
        "eos_token_id": end_tokens,
        "epsilon_cutoff": {**WITH_SAMPLING, "epsilon_cutoff": 0.3},
        "eta_cutoff": {**WITH_SAMPLING, "eta_cutoff": 0.9},
        "exponential_decay_length_penalty": {
            "eos_token_id": greedy[9],
            "exponential_decay_length_penalty": (1, 4.0),
        },
        "forced_bos_token_id": {"forced_bos_token_id": greedy[0], "input_ids": PROMPT_IDS[:, :1]},
        "forced_eos_token_id": {"forced_eos_token_id": 5},
        "length_penalty": {"length_penalty": 2.0},
        "max_length": {"max_length": length + 17, "max_new_tokens": None},
        "max_new_tokens": {"max_new_tokens": 13},
        "max_time": {"max_time": 1e-9},
        "min_length": {"min_length": length + 9, **end_tokens},
        "min_new_tokens": {"min_new_tokens": 9, **end_tokens},
        "min_p": {**WITH_SAMPLING, "min_p": 0.9},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "output_attentions": {**WITH_DICT, "output_attentions": True},
        "output_hidden_states": {**WITH_DICT, "output_hidden_states": True},
        "output_logits": {**WITH_DICT, "output_logits": True},
        "output_scores": {**WITH_DICT, **WITH_SAMPLING, "output_scores": True, "top_k": 5},
        "pad_token_id": {"pad_token_id": 5},
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {**WITH_SAMPLING, "renormalize_logits": True},
        "repetition_penalty": {"repetition_penalty": 3.0},
        "return_dict_in_generate": WITH_DICT,
        "sequence_bias": {"sequence_bias": [[[greedy[1], greedy[2]], -50.0], [[greedy[5]], -9.0]]},
        "stop_strings": {"stop_strings": [bytes(greedy[7:10]).decode(), "?!"]},
        "suppress_tokens": {"suppress_tokens": [greedy[2], greedy[7]]},
        "temperature": {**WITH_SAMPLING, "temperature": 3.0},
        "top_h": {**WITH_SAMPLING, "top_h": 0.1},
        "top_k": {**WITH_SAMPLING, "top_k": 1},
        "top_p": {**WITH_SAMPLING, "top_p": 0.2},
        "typical_p": {**WITH_SAMPLING, "typical_p": 0.2},
    }


SUPPORTED_FIELDS = make_supported_options([65] * NEW_TOKENS).keys()
FIELDS_WITHOUT_EFFECT = {
    *("bos_token_id", "decoder_start_token_id", "disable_compile", "early_stopping"),
    *("length_penalty", "pad_token_id", "remove_invalid_values", "renormalize_logits"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    "return_dict_in_generate",
}
"""Supported fields that do not change the text. The options of all other fields must change it."""
UNSUPPORTED_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("assistant_early_exit", "assistant_lookbehind", "guidance_scale"), 2),
    **dict.fromkeys(("max_cache_len", "max_matching_ngram_size", "num_assistant_tokens"), 2),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 2),
    **dict.fromkeys(("prefill_chunk_size", "prompt_lookup_num_tokens", "target_lookbehind"), 2),
    **dict.fromkeys(("assistant_confidence_threshold", "assistant_ensemble_weight"), 0.5),
    **dict.fromkeys(("diversity_penalty", "penalty_alpha"), 0.5),
    **dict.fromkeys(("is_assistant", "low_memory", "return_legacy_cache"), True),
    **dict.fromkeys(("token_healing", "use_mtp"), True),
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": transformers.CompileConfig(),
    "constraints": [1],
    "continuous_batching_config": object(),
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "num_assistant_tokens_schedule": "heuristic",
    "speculation_type": "dflash",
    "use_cache": False,
    "watermarking_config": transformers.WatermarkingConfig(),
}
UNSUPPORTED_ARGUMENTS = {
    *("assistant_model", "assistant_tokenizer", "custom_generate", "inputs_embeds"),
    *("logits_processor", "logits_to_keep", "negative_prompt_attention_mask"),
    *("negative_prompt_ids", "past_key_values", "pixel_values", "position_ids"),
    *("prefix_allowed_tokens_fn", "stopping_criteria", "synced_gpus", "token_type_ids"),
    *("trust_remote_code", "use_model_defaults"),
}
FIELDS = {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}


@pytest.fixture(scope="module")
def folder() -> str:
    return str(tiny_model.get_model_folder(name="log"))


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    """The tiny model as transformers loads it. It is too small for more than one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def greedy(model: Any) -> list[int]:
    """The text that the model generates greedily after the prompt."""
    text = model.generate(PROMPT_IDS, max_new_tokens=NEW_TOKENS, do_sample=False)
    return text[0, PROMPT_IDS.shape[1] :].tolist()


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replaces the drafter. Drafts are some tokens of `text`, then tokens of `make_wrong_token`."""
    rng = random.Random(0)
    drafter = SimpleNamespace(text=[], make_wrong_token=lambda: rng.randrange(32, 128))

    def propose(_: Any, count: Any, **__: Any) -> SimpleNamespace:
        length = int(count[0])
        draft = drafter.text[length : length + rng.randint(0, K)]
        draft = draft + [drafter.make_wrong_token() for _ in range(K - len(draft))]
        return SimpleNamespace(
            draft_token_ids=np.array([draft], np.int32), num_draft_tokens=np.array([K])
        )

    monkeypatch.setattr(adapter, "NgramProposer", lambda *_, **__: SimpleNamespace(propose=propose))
    return drafter


@pytest.fixture
def deterministic_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes a sampled token a function of its probabilities. Equal texts then show that drafts
    change neither a probability nor the choice."""

    def choose(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        return (probabilities.cumsum(-1) < 0.8).sum(-1, keepdim=True).clamp(max=127)

    monkeypatch.setattr(torch, "multinomial", choose)


def get_text(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def assert_equal(output: Any, expected: Any) -> None:
    """Compares two outputs of `generate`, which may be tensors or nested containers of these."""
    assert type(output) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert output.shape == expected.shape
        torch.testing.assert_close(output, expected)
    elif isinstance(expected, dict):
        assert output.keys() == expected.keys()
        for name in expected:
            assert_equal(output[name], expected[name])
    elif isinstance(expected, tuple):
        assert len(output) == len(expected)
        for item, expected_item in zip(output, expected, strict=True):
            assert_equal(item, expected_item)
    elif hasattr(expected, "get_seq_length"):
        assert output.get_seq_length() == expected.get_seq_length()
        for layer, expected_layer in zip(output.layers, expected.layers, strict=True):
            assert_equal(layer.keys, expected_layer.keys)
    else:
        assert output == expected


@contextmanager
def count_passes(model: Any) -> Iterator[list[None]]:
    """Yields a list that gets an item for each forward pass within the block."""
    passes: list[None] = []
    hook = model.register_forward_hook(lambda *_: passes.append(None))
    try:
        yield passes
    finally:
        hook.remove()


def compare_outputs(model: Any, drafter: Any, **options: Any) -> tuple[torch.Tensor, int]:
    """Compares the outputs with and without drafts. Returns the text and the number of forward
    passes with drafts."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    expected = model.generate(**settings)
    drafter.text = get_text(expected)[0].tolist()
    with count_passes(model) as passes, drafting(model, NgramConfig(k=K)):
        output = model.generate(**settings)
    assert_equal(output, expected)
    return get_text(expected), len(passes)


def test_tables_above_contain_all_fields_and_arguments() -> None:
    """`drafting` rejects a new field or argument until these tests cover it."""
    assert not SUPPORTED_FIELDS & UNSUPPORTED_FIELDS.keys()
    assert adapter._CONFIG_FIELDS - {"transformers_version"} == SUPPORTED_FIELDS
    assert SUPPORTED_FIELDS | UNSUPPORTED_FIELDS.keys() >= FIELDS
    arguments = inspect.signature(GenerationMixin.generate).parameters.keys()
    assert arguments <= UNSUPPORTED_ARGUMENTS | adapter._ARGUMENTS | {"self", "kwargs"}
    assert not UNSUPPORTED_ARGUMENTS & adapter._ARGUMENTS
    families = {f"{family}ForConditionalGeneration" for family in models.IMAGE_MODELS}
    assert families == adapter._IMAGE_MODELS


@pytest.mark.parametrize("field", sorted(FIELDS & SUPPORTED_FIELDS))
def test_drafting_with_supported_field_returns_equal_output(
    model: Any,
    folder: str,
    greedy: list[int],
    drafter: SimpleNamespace,
    deterministic_sampling: None,
    field: str,
) -> None:
    defaults = {"input_ids": PROMPT_IDS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    options = defaults | make_supported_options(greedy)[field]
    if field == "stop_strings":
        options["tokenizer"] = AutoTokenizer.from_pretrained(folder)
    if field == "output_attentions":
        model.set_attn_implementation("eager")
    try:
        text, passes = compare_outputs(model, drafter, **options)
    finally:
        model.set_attn_implementation("sdpa")
    num_generated = text.shape[1] - options["input_ids"].shape[1]
    assert passes < num_generated or num_generated == 1  # some drafts were accepted
    other_options = {name: value for name, value in options.items() if name != field}
    if field in defaults:
        other_options[field] = defaults[field]
    elif field == "max_length":
        other_options["max_new_tokens"] = NEW_TOKENS
    text_without_field = get_text(model.generate(**other_options))
    assert text_without_field.equal(text) == (field in FIELDS_WITHOUT_EFFECT)


@pytest.mark.parametrize("field", sorted(FIELDS & UNSUPPORTED_FIELDS.keys()))
def test_drafting_with_unsupported_field_raises_error(model: Any, field: str) -> None:
    options = {"max_new_tokens": 3, "do_sample": True, field: UNSUPPORTED_FIELDS[field]}
    config = GenerationConfig(max_new_tokens=3, do_sample=True)
    setattr(config, field, UNSUPPORTED_FIELDS[field])
    for arguments in (options, {"generation_config": config}):
        with drafting(model), pytest.raises(ValueError, match=rf"^drafting: .*{field}="):
            model.generate(PROMPT_IDS, **arguments)


def test_drafting_with_default_fields_is_accepted(model: Any) -> None:
    """The fields have their defaults explicitly, and one is False instead of None."""
    defaults = getattr(GenerationConfig(), "_get_default_generation_params", dict)()
    fields = {**vars(GenerationConfig()), **defaults, "is_assistant": False, "max_new_tokens": 3}
    options = {
        name: value for name, value in fields.items() if name in FIELDS and value is not None
    }
    options.pop("max_length", None)
    with drafting(model):
        model.generate(PROMPT_IDS, **options)


def test_drafting_with_unknown_field_or_unsupported_default_raises_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in (1, True):
        config = GenerationConfig(max_new_tokens=3, a_new_field=value)
        with drafting(model), pytest.raises(ValueError, match=r"drafting: .*a_new_field="):
            model.generate(PROMPT_IDS, generation_config=config)
    monkeypatch.setattr(model.generation_config, "guidance_scale", 2.0)
    with drafting(model), pytest.raises(ValueError, match=r"drafting: .*guidance_scale="):
        model.generate(PROMPT_IDS, max_new_tokens=3)


@pytest.mark.parametrize("argument", [*sorted(UNSUPPORTED_ARGUMENTS), "no_argument"])
def test_drafting_with_unsupported_argument_raises_error(model: Any, argument: str) -> None:
    with drafting(model), pytest.raises(ValueError, match=f"^drafting: .*{argument}="):
        model.generate(PROMPT_IDS, max_new_tokens=3, **{argument: object()})
    if argument in inspect.signature(GenerationMixin.generate).parameters:
        with drafting(model):
            model.generate(PROMPT_IDS, max_new_tokens=3, **{argument: None})


def test_drafting_with_several_requests_raises_error(model: Any) -> None:
    rows = PROMPT_IDS.repeat(2, 1)
    for arguments, options in (([rows], {}), ([], {"inputs": rows}), ([], {"input_ids": rows})):
        with drafting(model), pytest.raises(ValueError, match="one request per call"):
            model.generate(*arguments, **options)


def test_drafting_with_padded_prompt_returns_equal_text(
    model: Any, drafter: SimpleNamespace
) -> None:
    for masked_positions in ([0, 1, 2], [0, 20, 21]):
        mask = torch.ones_like(PROMPT_IDS)
        mask[0, masked_positions] = 0
        compare_outputs(model, drafter, input_ids=PROMPT_IDS, attention_mask=mask)


@pytest.mark.parametrize("distance", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("do_sample", [False, True])
def test_output_with_stop_condition_ends_at_same_token(
    model: Any,
    folder: str,
    drafter: SimpleNamespace,
    deterministic_sampling: None,
    do_sample: bool,
    distance: int,
) -> None:
    """Ends at positions with this distance: at a string of two tokens, at a token, and at the
    length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampling = {"input_ids": PROMPT_IDS, "do_sample": do_sample, "temperature": 2.0}
    text, _ = compare_outputs(model, drafter, **sampling)
    generated = text[0, PROMPT_IDS.shape[1] :].tolist()
    lengths = set()
    for position in range(0, NEW_TOKENS - 1, distance):
        first, second = generated[position : position + 2]
        for ending in (
            {"stop_strings": [bytes([first, second]).decode()], "tokenizer": tokenizer},
            {"eos_token_id": first},
            {"max_new_tokens": position + 1},
        ):
            ended_text, _ = compare_outputs(model, drafter, **sampling, **ending)
            lengths.add(ended_text.shape[1])
    assert len(lengths) >= NEW_TOKENS / distance


@pytest.mark.parametrize("ending", ["stop_strings", "eos_token_id"])
def test_prompt_that_ends_with_stop_is_continued(
    model: Any,
    folder: str,
    drafter: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    """Without drafts, only the tokens after the prompt are compared with the stop conditions.
    Before version 5.17, transformers also checks the prompt and its draft."""
    get_candidates = adapter.NgramCandidates.get_candidates

    def check_candidates(self: Any, *arguments: Any) -> Any:
        candidates = get_candidates(self, *arguments)
        assert not self._stopping_criteria(candidates[0], None).any()
        return candidates

    monkeypatch.setattr(adapter.NgramCandidates, "get_candidates", check_candidates)
    prompt = PROMPT_IDS[:, : PROMPT.rindex(b"\n") + 1]
    options: dict[str, Any] = {"eos_token_id": NEWLINE}
    if ending == "stop_strings":
        options = {"stop_strings": ["\n"], "tokenizer": AutoTokenizer.from_pretrained(folder)}
    text, _ = compare_outputs(model, drafter, input_ids=prompt, **options)
    assert text.shape[1] > prompt.shape[1] + 1


def test_streamer_receives_equal_text(
    model: Any, folder: str, drafter: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextStreamer(AutoTokenizer.from_pretrained(folder))
    compare_outputs(model, drafter, input_ids=PROMPT_IDS, streamer=streamer, eos_token_id=NEWLINE)
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] == printed[half:] != ""


def test_later_calls_draft_from_the_store(model: Any) -> None:
    """The second call is a conversation's next turn: its prompt begins with the text of the first
    call, and a prompt is not stored."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    first = model.generate(PROMPT_IDS, **options)
    turn = torch.cat([first, PROMPT_IDS], 1)
    second = model.generate(turn, **options)
    store, pass_counts = NgramStore(8192), []
    for _ in range(2):
        with (
            drafting(model, NgramConfig(k=4, min_draft_probability=0.12), store=store),
            count_passes(model) as passes,
        ):
            assert model.generate(PROMPT_IDS, **options).equal(first)
            assert model.generate(turn, **options).equal(second)
        pass_counts.append(len(passes))
        assert store.statistics.tokens_held <= 2 * NEW_TOKENS * len(pass_counts)
    assert pass_counts[1] < pass_counts[0]


@pytest.mark.parametrize("name", models.CAUSAL_MODELS)
def test_drafting_with_causal_model_returns_equal_text(name: str, drafter: SimpleNamespace) -> None:
    model = models.make_causal_model(name, models.CAUSAL_MODELS[name])
    drafter.make_wrong_token = lambda: 3
    generated: set[int] = set()
    for prompt in ([5], [9, 7, 30], list(range(4, 24))):
        text, passes = compare_outputs(model, drafter, input_ids=torch.tensor([prompt]))
        assert passes < NEW_TOKENS
        generated |= set(text[0, len(prompt) :].tolist())
    assert len(generated) > 3


@pytest.mark.parametrize("name", models.UNSUPPORTED_MODELS)
def test_drafting_with_unsupported_model_raises_error(name: str) -> None:
    class_name, settings, message = models.UNSUPPORTED_MODELS[name]
    model = models.make_causal_model(class_name, settings)
    with (
        pytest.raises((TypeError, ValueError), match=f"^drafting: .*{message}"),
        drafting(model),
    ):
        model.generate(torch.tensor([[5]]), max_new_tokens=3)
    assert not {"generate", *adapter._REPLACED_METHODS} & vars(model).keys()


@pytest.mark.parametrize("family", models.IMAGE_MODELS)
def test_drafting_with_image_returns_equal_text(family: str, drafter: SimpleNamespace) -> None:
    """The wrong draft tokens are placeholders of an image."""
    model, prompt, image = models.make_image_model(family)
    drafter.make_wrong_token = lambda: models.IMAGE
    text, passes = compare_outputs(model, drafter, input_ids=prompt, **image)
    assert passes < NEW_TOKENS
    assert len(set(text[0, prompt.shape[1] :].tolist())) > 3


def test_drafting_with_image_whose_tokens_recur_returns_equal_text() -> None:
    """The prompt's last tokens also occur before the image, so the lookup finds image tokens."""
    model, prompt, image = models.make_image_model("Llava")
    settings = {"max_new_tokens": 4, "do_sample": False}
    expected = model.generate(input_ids=prompt, **image, **settings)
    with drafting(model, NgramConfig(k=K)):
        assert model.generate(input_ids=prompt, **image, **settings).equal(expected)


def test_drafting_with_peft_model_raises_error(model: Any) -> None:
    """A PeftModel's `generate` calls `generate` of the base model. With prompt learning, the
    PeftModel replaces a method of the base model during the call."""

    class PeftModel:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return model.generate(*args, **kwargs)

    with (
        pytest.raises(TypeError, match=r"^drafting: .*PeftModel: .*pass get_base_model\(\)"),
        drafting(PeftModel()),
    ):
        pass
    with drafting(model), pytest.MonkeyPatch.context() as patch:
        PeftModel().generate(PROMPT_IDS, max_new_tokens=3)
        patch.setattr(model, "prepare_inputs_for_generation", lambda *_, **__: {})
        with pytest.raises(ValueError, match="drafting: prompt learning"):
            PeftModel().generate(PROMPT_IDS, max_new_tokens=3)


@pytest.mark.parametrize("num_prompts", [30, pytest.param(100, marks=pytest.mark.slow)])
def test_texts_with_drafts_equal_batch_without_drafts(
    model: Any, monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    lengths, get_candidates = [], adapter.NgramCandidates.get_candidates

    def record_length(self: Any, input_ids: torch.Tensor, *arguments: Any) -> Any:
        candidates = get_candidates(self, input_ids, *arguments)
        lengths.append(candidates[0].shape[1] - input_ids.shape[1])
        return candidates

    monkeypatch.setattr(adapter.NgramCandidates, "get_candidates", record_length)
    # transformers before 5.17 does not speculate after a prompt that ends with the stop token.
    stop = ord("8")
    prompts = [p for p in tiny_model.make_prompts(120, seed=2) if p[-1] != stop]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": stop}
    prompts = prompts[:num_prompts]
    batch = model.generate(**tiny_model.pad_left(prompts), **options)
    num_generated = 0
    with drafting(model, NgramConfig(k=4)) as statistics, count_passes(model) as passes:
        for prompt, row in zip(prompts, batch[:, -NEW_TOKENS:], strict=True):
            text = model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
            assert row[: len(text)].equal(text)
            assert not row[len(text) :].any()
            num_generated += len(text)
    assert max(lengths) == 4
    assert len(passes) < 0.75 * num_generated
    assert statistics.steps == len(passes)
    assert statistics.draft_tokens == sum(lengths)
    assert statistics.accepted_tokens == num_generated - len(passes)
    assert not {"_get_candidate_generator", "generate"} & {*vars(model)}


@pytest.mark.filterwarnings("ignore")  # torch deprecates this module
def test_model_that_quantizes_activations_is_rejected() -> None:
    model = models.make_causal_model("LlamaForCausalLM", {}).float()
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})
    with (
        pytest.raises(TypeError, match=r"drafting: model: .*: it quantizes activations per call"),
        drafting(quantized),
    ):
        pass


def test_default_drafts_end_by_cost(model: Any) -> None:
    prompts = [torch.tensor([prompt]) for prompt in tiny_model.make_prompts(10, seed=3)]
    with drafting(model) as by_cost:
        for prompt in prompts:
            model.generate(prompt, max_new_tokens=48, do_sample=False)
    with drafting(model, NgramConfig(k=8)) as fixed_length:
        for prompt in prompts:
            model.generate(prompt, max_new_tokens=48, do_sample=False)
    assert by_cost.acceptance_rate > fixed_length.acceptance_rate
    assert 0 < by_cost.draft_tokens < fixed_length.draft_tokens
    assert 1 < by_cost.tokens_per_step <= fixed_length.tokens_per_step


def test_example_of_guide_runs(model: Any) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.M | re.S)
    (example,) = [block for block in blocks if "engines.transformers" in block]
    exec(example, {"model": model, "inputs": tiny_model.pad_left(tiny_model.make_prompts(1))})


def test_nested_drafting_of_same_model_raises(model: Any) -> None:
    with (
        drafting(model),
        pytest.raises(RuntimeError, match="already active for this model"),
        drafting(model),
    ):
        pass


def test_import_with_old_version_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.9.2")
    message = "ngram_npu.engines.transformers: expected transformers 4.57 or later, got 4.9.2"
    with pytest.raises(ImportError, match=f"^{message}$"):
        runpy.run_path(adapter.__file__)


@pytest.mark.parametrize("version", [adapter.OLDEST_VERSION, adapter.NEWEST_VERSION])
def test_import_with_tested_version_does_not_warn(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{version}.9")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runpy.run_path(adapter.__file__)


@pytest.mark.parametrize("version", ["5.25.0", "6.0.0"])
def test_newer_version_warns_and_checks_interface(
    version: str, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.warns(UserWarning, match=f"transformers {version} is newer than 5"):
        newer = runpy.run_path(adapter.__file__)
    with newer["drafting"](model):
        pass

    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", lambda self, settings: None)
    with (
        pytest.raises(RuntimeError, match=f"transformers {version} does not have"),
        newer["drafting"](model),
    ):
        pass
