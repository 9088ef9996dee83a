"""`drafting` changes no output of `model.generate`, or refuses the call with an error that names
the reason. All arguments and options of the installed transformers are tried."""

from __future__ import annotations

import inspect
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ngram_npu import NgramConfig, NgramStore

pytest.importorskip("transformers")

import ngram_npu.engines.transformers as ours
import transformers
from runner import image_models, worlds
from transformers import (
    AutoTokenizer,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    TextStreamer,
)

K = 5
NEW_TOKENS = 24
NEWLINE = ord("\n")
PROMPT = b"> read(a41)\nread(a41) ok\n> find(c70)\nfind(c70) no\n> read(a4"
TOKENS = torch.tensor([list(PROMPT)])
SAMPLED = {"do_sample": True}
RETURNED = {"return_dict_in_generate": True}


def supported(said: list[int]) -> dict[str, dict[str, Any]]:
    """Options that try each field of a generation config with which drafts change no text.

    said: the greedy output, from which the tokens are chosen for which the options are to matter.
    """
    length = TOKENS.shape[1]
    ends = {"eos_token_id": [said[3], said[12]]}
    return {
        "bad_words_ids": {"bad_words_ids": [[said[4]], [said[1], said[2]]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [said[0]]},
        "bos_token_id": {"bos_token_id": 5},
        "decoder_start_token_id": {"decoder_start_token_id": 5},
        "disable_compile": {"disable_compile": True},
        "do_sample": SAMPLED,
        "early_stopping": {"early_stopping": True},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 3},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.2},
        "eos_token_id": ends,
        "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 0.3},
        "eta_cutoff": {**SAMPLED, "eta_cutoff": 0.9},
        "exponential_decay_length_penalty": {
            "eos_token_id": said[9],
            "exponential_decay_length_penalty": (1, 4.0),
        },
        "forced_bos_token_id": {"forced_bos_token_id": said[0], "input_ids": TOKENS[:, :1]},
        "forced_eos_token_id": {"forced_eos_token_id": 5},
        "length_penalty": {"length_penalty": 2.0},
        "max_length": {"max_length": length + 17, "max_new_tokens": None},
        "max_new_tokens": {"max_new_tokens": 13},
        "max_time": {"max_time": 1e-9},
        "min_length": {"min_length": length + 9, **ends},
        "min_new_tokens": {"min_new_tokens": 9, **ends},
        "min_p": {**SAMPLED, "min_p": 0.9},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "output_attentions": {**RETURNED, "output_attentions": True},
        "output_hidden_states": {**RETURNED, "output_hidden_states": True},
        "output_logits": {**RETURNED, "output_logits": True},
        "output_scores": {**RETURNED, **SAMPLED, "output_scores": True, "top_k": 5},
        "pad_token_id": {"pad_token_id": 5},
        "remove_invalid_values": {"remove_invalid_values": True},
        "renormalize_logits": {**SAMPLED, "renormalize_logits": True},
        "repetition_penalty": {"repetition_penalty": 3.0},
        "return_dict_in_generate": RETURNED,
        "sequence_bias": {"sequence_bias": [[[said[1], said[2]], -50.0], [[said[5]], -9.0]]},
        "stop_strings": {"stop_strings": [bytes(said[7:10]).decode(), "?!"]},
        "suppress_tokens": {"suppress_tokens": [said[2], said[7]]},
        "temperature": {**SAMPLED, "temperature": 3.0},
        "top_h": {**SAMPLED, "top_h": 0.1},
        "top_k": {**SAMPLED, "top_k": 1},
        "top_p": {**SAMPLED, "top_p": 0.2},
        "typical_p": {**SAMPLED, "typical_p": 0.2},
    }


SUPPORTED = supported([65] * NEW_TOKENS).keys()
WITHOUT_EFFECT = {
    *("bos_token_id", "decoder_start_token_id", "disable_compile", "early_stopping"),
    *("length_penalty", "pad_token_id", "remove_invalid_values", "renormalize_logits"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores"),
    "return_dict_in_generate",
}
"""These fields do not change the text. The options of the others must."""
REFUSED: dict[str, Any] = {
    "assistant_confidence_threshold": 0.5,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 5,
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": transformers.CompileConfig(),
    "constraints": [1],
    "continuous_batching_config": object(),
    "diversity_penalty": 0.5,
    "dola_layers": "low",
    "force_words_ids": [[5]],
    "guidance_scale": 2.0,
    "is_assistant": True,
    "low_memory": True,
    "max_cache_len": 100,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beam_groups": 2,
    "num_beams": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 8,
    "prompt_lookup_num_tokens": 3,
    "return_legacy_cache": True,
    "speculation_type": "dflash",
    "target_lookbehind": 5,
    "token_healing": True,
    "use_cache": False,
    "use_mtp": True,
    "watermarking_config": transformers.WatermarkingConfig(),
}
ARGUMENTS: dict[str, Any] = {
    "assistant_model": object(),
    "assistant_tokenizer": object(),
    "custom_generate": lambda *_, **__: None,
    "inputs_embeds": torch.zeros(1, 3, 64, dtype=torch.float64),
    "logits_processor": LogitsProcessorList(),
    "logits_to_keep": 1,
    "negative_prompt_attention_mask": torch.ones(1, 2),
    "negative_prompt_ids": TOKENS,
    "past_key_values": DynamicCache(),
    "pixel_values": torch.zeros(1, 3, 8, 8),
    "position_ids": torch.arange(TOKENS.shape[1])[None],
    "prefix_allowed_tokens_fn": lambda *_: [5],
    "stopping_criteria": StoppingCriteriaList([lambda *_, **__: torch.ones(1, dtype=torch.bool)]),
    "synced_gpus": True,
    "token_type_ids": torch.zeros_like(TOKENS),
    "trust_remote_code": True,
    "use_model_defaults": True,
}
FIELDS = {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Drafts for each step: some tokens of `text`, then wrong ones, which `wrong` returns."""
    random_ = random.Random(0)
    drafter = SimpleNamespace(text=[], wrong=lambda: random_.randrange(32, 128))

    def propose(_: Any, count: Any, **__: Any) -> SimpleNamespace:
        length = int(count[0])
        draft = drafter.text[length : length + random_.randint(0, K)]
        draft = draft + [drafter.wrong() for _ in range(K - len(draft))]
        return SimpleNamespace(
            draft_token_ids=np.array([draft], np.int32), num_draft_tokens=np.array([K])
        )

    monkeypatch.setattr(ours, "NgramProposer", lambda *_, **__: SimpleNamespace(propose=propose))
    return drafter


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampled token follows from its probabilities alone: so equal texts show that all
    probabilities are equal, and that no draft changes the choice."""

    def choose(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        return (probabilities.cumsum(-1) < 0.8).sum(-1, keepdim=True).clamp(max=127)

    monkeypatch.setattr(torch, "multinomial", choose)


def text_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def assert_equal(found: Any, expected: Any) -> None:
    """Of all that `generate` may return."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_equal(found[name], expected[name])
    elif isinstance(expected, tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif hasattr(expected, "get_seq_length"):
        assert found.get_seq_length() == expected.get_seq_length()
        for one, other in zip(found.layers, expected.layers, strict=True):
            assert_equal(one.keys, other.keys)
    else:
        assert found == expected


def compare(model: Any, guesses: SimpleNamespace, **options: Any) -> tuple[torch.Tensor, int]:
    """Compares the output with drafts with that without. Returns the text and its passes."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    expected = model.generate(**settings)
    guesses.text = text_of(expected)[0].tolist()
    passes: list[None] = []
    counting = model.register_forward_hook(lambda *_: passes.append(None))
    try:
        with ours.drafting(model, NgramConfig(k=K)):
            found = model.generate(**settings)
    finally:
        counting.remove()
    assert_equal(found, expected)
    return text_of(expected), len(passes)


def test_tables_name_all_fields_and_arguments() -> None:
    """A field or an argument that a new version adds is refused until it has been tried here."""
    assert not SUPPORTED & REFUSED.keys()
    assert ours._FIELDS - {"transformers_version"} == SUPPORTED
    assert SUPPORTED | REFUSED.keys() >= FIELDS
    arguments = inspect.signature(GenerationMixin.generate).parameters.keys()
    assert arguments <= ARGUMENTS.keys() | ours._ARGUMENTS | {"self", "kwargs"}
    assert not ARGUMENTS.keys() & ours._ARGUMENTS
    families = {f"{family}ForConditionalGeneration" for family in image_models.MODELS}
    assert families == ours._IMAGE_MODELS


@pytest.mark.parametrize("field", sorted(FIELDS & SUPPORTED))
def test_drafting_with_supported_field_returns_equal_output(
    plain_model: Any, folder: str, guesses: SimpleNamespace, choices: None, field: str
) -> None:
    plainly = {"input_ids": TOKENS, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    said = plain_model.generate(**plainly)[0, TOKENS.shape[1] :].tolist()
    options = plainly | supported(said)[field]
    if field == "stop_strings":
        options["tokenizer"] = AutoTokenizer.from_pretrained(folder)
    if field == "output_attentions":
        plain_model.set_attn_implementation("eager")
    try:
        text, passes = compare(plain_model, guesses, **options)
    finally:
        plain_model.set_attn_implementation("sdpa")
    generated = text.shape[1] - options["input_ids"].shape[1]
    assert passes < generated or generated == 1  # some drafts were accepted
    without = {name: value for name, value in options.items() if name != field}
    if field in plainly:
        without[field] = plainly[field]
    elif field == "max_length":
        without["max_new_tokens"] = NEW_TOKENS
    plain = text_of(plain_model.generate(**without))
    assert plain.equal(text) == (field in WITHOUT_EFFECT)


@pytest.mark.parametrize("field", sorted(FIELDS & REFUSED.keys()))
def test_drafting_with_other_field_raises_error(plain_model: Any, field: str) -> None:
    options = {"max_new_tokens": 3, "do_sample": True, field: REFUSED[field]}
    config = GenerationConfig(max_new_tokens=3, do_sample=True)
    setattr(config, field, REFUSED[field])
    for given in (options, {"generation_config": config}):
        with ours.drafting(plain_model), pytest.raises(ValueError, match=rf"^drafting: .*{field}="):
            plain_model.generate(TOKENS, **given)


def test_drafting_with_default_fields_is_accepted(plain_model: Any) -> None:
    """Also if they are given, and False in place of None."""
    defaults = getattr(GenerationConfig(), "_get_default_generation_params", dict)()
    given = {**vars(GenerationConfig()), **defaults, "is_assistant": False, "max_new_tokens": 3}
    options = {name: value for name, value in given.items() if name in FIELDS and value is not None}
    options.pop("max_length", None)
    with ours.drafting(plain_model):
        plain_model.generate(TOKENS, **options)


def test_drafting_with_unknown_field_raises_error(
    plain_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in ({"a_new_field": 1}, {"a_new_field": True}):
        config = GenerationConfig(max_new_tokens=3, **given)
        with (
            ours.drafting(plain_model),
            pytest.raises(ValueError, match=r"drafting: .*a_new_field="),
        ):
            plain_model.generate(TOKENS, generation_config=config)
    monkeypatch.setattr(plain_model.generation_config, "guidance_scale", 2.0)
    with (
        ours.drafting(plain_model),
        pytest.raises(ValueError, match=r"drafting: .*guidance_scale="),
    ):
        plain_model.generate(TOKENS, max_new_tokens=3)


@pytest.mark.parametrize("argument", [*ARGUMENTS, "no_argument"])
def test_drafting_with_other_argument_raises_error(plain_model: Any, argument: str) -> None:
    given = {argument: ARGUMENTS.get(argument, 1)}
    with ours.drafting(plain_model), pytest.raises(ValueError, match=f"^drafting: .*{argument}="):
        plain_model.generate(TOKENS, max_new_tokens=3, **given)
    if argument in inspect.signature(GenerationMixin.generate).parameters:
        with ours.drafting(plain_model):
            plain_model.generate(TOKENS, max_new_tokens=3, **{argument: None})


def test_drafting_with_several_requests_raises_error(plain_model: Any) -> None:
    both = TOKENS.repeat(2, 1)
    for call in (
        lambda: plain_model.generate(both),
        lambda: plain_model.generate(inputs=both),
        lambda: plain_model.generate(input_ids=both),
    ):
        with ours.drafting(plain_model), pytest.raises(ValueError, match="one request per call"):
            call()


def test_drafting_with_padded_prompt_returns_equal_text(
    plain_model: Any, guesses: SimpleNamespace
) -> None:
    for masked in ([0, 1, 2], [0, 20, 21]):
        mask = torch.ones_like(TOKENS)
        mask[0, masked] = 0
        compare(plain_model, guesses, input_ids=TOKENS, attention_mask=mask)


@pytest.mark.parametrize("do_sample", [False, True])
def test_output_ends_where_it_ends_without_drafts(
    plain_model: Any, folder: str, guesses: SimpleNamespace, choices: None, do_sample: bool
) -> None:
    """At each place: by a string of two tokens, by one token, and by the length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampled = {"input_ids": TOKENS, "do_sample": do_sample, "temperature": 2.0}
    text, _ = compare(plain_model, guesses, **sampled)
    said = text[0, TOKENS.shape[1] :].tolist()
    ends = set()
    for place in range(0, NEW_TOKENS - 1, 2):
        first, second = said[place : place + 2]
        for ending in (
            {"stop_strings": [bytes([first, second]).decode()], "tokenizer": tokenizer},
            {"eos_token_id": first},
            {"max_new_tokens": place + 1},
        ):
            ended, _ = compare(plain_model, guesses, **sampled, **ending)
            ends.add(ended.shape[1])
    assert len(ends) > 8


@pytest.mark.parametrize("ending", ["stop_strings", "eos_token_id"])
def test_prompt_that_ends_with_stop_is_continued(
    plain_model: Any,
    folder: str,
    guesses: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
    ending: str,
) -> None:
    """Without drafts only what follows the prompt is compared with the stops. Before version 5.17
    transformers asks for the prompt and its draft."""
    candidates = ours.NgramCandidates.get_candidates

    def stopping(self: Any, *arguments: Any) -> Any:
        found = candidates(self, *arguments)
        assert not self._stopping_criteria(found[0], None).any()
        return found

    monkeypatch.setattr(ours.NgramCandidates, "get_candidates", stopping)
    prompt = TOKENS[:, : PROMPT.rindex(b"\n") + 1]
    options: dict[str, Any] = {"eos_token_id": NEWLINE}
    if ending == "stop_strings":
        options = {"stop_strings": ["\n"], "tokenizer": AutoTokenizer.from_pretrained(folder)}
    text, _ = compare(plain_model, guesses, input_ids=prompt, **options)
    assert text.shape[1] > prompt.shape[1] + 1


def test_streamer_receives_equal_text(
    plain_model: Any, folder: str, guesses: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextStreamer(AutoTokenizer.from_pretrained(folder))
    compare(plain_model, guesses, input_ids=TOKENS, streamer=streamer, eos_token_id=NEWLINE)
    printed = capsys.readouterr().out
    half = len(printed) // 2
    assert printed[:half] == printed[half:] != ""


@pytest.mark.parametrize("visibility", ["live", "finish"])
def test_call_that_continues_previous_text_drafts_from_store(
    plain_model: Any, monkeypatch: pytest.MonkeyPatch, visibility: Any
) -> None:
    """As a conversation's next turn does. The store would take it for the same request, whose text
    "finish" hides, and its prompt for output."""
    stores: list[NgramStore] = []
    make_store = ours.make_store
    monkeypatch.setattr(
        ours, "make_store", lambda *a, **k: stores.append(make_store(*a, **k)) or stores[0]
    )
    ngram = replace(worlds.LADDER, store=visibility, store_tokens=8192)
    with ours.drafting(plain_model, ngram):
        first = plain_model.generate(TOKENS, max_new_tokens=NEW_TOKENS, do_sample=False)
        hits = stores[0].statistics.hits
        turn = torch.cat([first, TOKENS], 1)
        plain_model.generate(turn, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert stores[0].statistics.hits > hits
    assert stores[0].statistics.tokens_held <= 2 * NEW_TOKENS


TINY = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,  # else such a model repeats its last token
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {
        "type": "longrope",
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0},
}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
CAUSAL_MODELS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
    "Gemma2ForCausalLM": {"sliding_window": 8},
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 9},
    "Phi3ForCausalLM": {"sliding_window": 9},
    "Qwen3ForCausalLM": {},
}
OTHER_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic": ("LlamaForCausalLM", DYNAMIC, "depend on the length"),
    "longrope": ("LlamaForCausalLM", LONGROPE, "depend on the length"),
    "gpt": ("OpenAIGPTLMHeadModel", GPT2, "prepares its inputs by itself"),
    "images": (
        "GitForCausalLM",
        {"vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}},
        "reads more than text",
    ),
    "mamba": ("MambaForCausalLM", {"state_size": 8}, "only from a cache of attention"),
    "minimax": (
        "MiniMaxForCausalLM",
        {"num_local_experts": 2, "layer_types": ["full_attention", "linear_attention"]},
        "only from a cache of attention",
    ),
    "t5": ("T5ForConditionalGeneration", {"d_model": 64, "num_layers": 1}, "has an encoder"),
    "convolution": (
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        "cache of ",
    ),
}


def tiny(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**TINY | settings)).double().eval()


@pytest.mark.parametrize("name", CAUSAL_MODELS)
def test_drafting_with_causal_model_returns_equal_text(name: str, guesses: SimpleNamespace) -> None:
    model = tiny(name, CAUSAL_MODELS[name])
    guesses.wrong = lambda: 3
    said: set[int] = set()
    for prompt in ([5], [9, 7, 30], list(range(4, 24))):
        text, passes = compare(model, guesses, input_ids=torch.tensor([prompt]))
        assert passes < NEW_TOKENS
        said |= set(text[0, len(prompt) :].tolist())
    assert len(said) > 3


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_drafting_with_other_model_raises_error(name: str) -> None:
    kind, settings, message = OTHER_MODELS[name]
    model = tiny(kind, settings)
    with (
        pytest.raises((TypeError, ValueError), match=f"^drafting: .*{message}"),
        ours.drafting(model),
    ):
        model.generate(torch.tensor([[5]]), max_new_tokens=3)
    assert not {"generate", *ours._REPLACED} & vars(model).keys()


@pytest.mark.parametrize("family", image_models.MODELS)
def test_drafting_with_image_returns_equal_text(family: str, guesses: SimpleNamespace) -> None:
    """Wrong drafts are placeholders of images."""
    model, prompt, image = image_models.made(family)
    guesses.wrong = lambda: image_models.IMAGE
    text, passes = compare(model, guesses, input_ids=prompt, **image)
    assert passes < NEW_TOKENS
    assert len(set(text[0, prompt.shape[1] :].tolist())) > 3


def test_drafting_with_image_whose_tokens_recur_returns_equal_text() -> None:
    """The end of the prompt has been followed by the image before."""
    model, prompt, image = image_models.made("Llava")
    settings = {"max_new_tokens": 4, "do_sample": False}
    plain = model.generate(input_ids=prompt, **image, **settings)
    with ours.drafting(model, NgramConfig(k=K)):
        assert model.generate(input_ids=prompt, **image, **settings).equal(plain)


def test_drafting_with_peft_model_raises_error(plain_model: Any) -> None:
    """A PeftModel's `generate` calls that of the model within; prompt learning replaces a method of
    that model meanwhile."""

    class PeftModel:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain_model, name)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return plain_model.generate(*args, **kwargs)

    with (
        pytest.raises(TypeError, match=r"^drafting: .*PeftModel: .*pass get_base_model\(\)"),
        ours.drafting(PeftModel()),
    ):
        pass
    with ours.drafting(plain_model), pytest.MonkeyPatch.context() as patch:
        PeftModel().generate(TOKENS, max_new_tokens=3)
        patch.setattr(plain_model, "prepare_inputs_for_generation", lambda *_, **__: {})
        with pytest.raises(ValueError, match="drafting: prompt learning"):
            PeftModel().generate(TOKENS, max_new_tokens=3)
