"""Creates tiny models of transformers with random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

IMAGE, BEGIN, END, VIDEO = 39, 38, 37, 36
"""Token ids: placeholders, and the tokens before and after an image."""
_TEXT: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_SMALL_PATCHES = _VISION | {"patch_size": 2}
_LLAMA = _TEXT | {"model_type": "llama"}
_CLIP = _VISION | {"model_type": "clip_vision_model"}
_LLAVA = {"image_token_index": IMAGE, "image_seq_length": 4}
_QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2}
_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
_QWEN_TEXT = _TEXT | {
    "rope_scaling": {**_ROPE, "type": "mrope"},
    "rope_parameters": {**_ROPE, "rope_theta": 10000.0},
}
_QWEN_IDS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN}
_PIXELS = {"pixel_values": torch.randn(1, 3, 8, 8)}
_SIZES = {"image_sizes": torch.tensor([[8, 8]])}
_PATCHES = {"pixel_values": torch.randn(16, 96), "image_grid_thw": torch.tensor([[1, 4, 4]])}

IMAGE_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        _TEXT
        | {
            "sliding_window": 8,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
        },
        _VISION,
        {
            "tie_word_embeddings": False,
            "mm_tokens_per_image": 4,
            "image_token_index": IMAGE,
            "boi_token_index": BEGIN,
            "eoi_token_index": END,
        },
        _PIXELS,
    ),
    "Idefics3": (
        _LLAMA,
        _SMALL_PATCHES,
        {"image_token_id": IMAGE, "scale_factor": 2},
        {
            "pixel_values": torch.randn(1, 1, 3, 8, 8),
            "pixel_attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.long),
        },
    ),
    "InternVL": (
        _TEXT | {"model_type": "qwen2"},
        _VISION
        | {"image_size": [8, 8], "patch_size": [2, 2], "use_absolute_position_embeddings": True},
        {"image_token_id": IMAGE, "image_seq_length": 4},
        _PIXELS,
    ),
    "Llava": (_LLAMA, _CLIP, _LLAVA, _PIXELS),
    "LlavaNext": (
        _LLAMA,
        _CLIP,
        _LLAVA | {"image_grid_pinpoints": [[8, 8]]},
        {"pixel_values": torch.randn(1, 2, 3, 8, 8), **_SIZES},
    ),
    "Mistral3": (
        _TEXT | {"model_type": "mistral"},
        _SMALL_PATCHES | {"model_type": "pixtral", "head_dim": 16},
        {"image_token_index": IMAGE, "spatial_merge_size": 2},
        _PIXELS | _SIZES,
    ),
    "Qwen2VL": (
        _QWEN_TEXT,
        _QWEN | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2},
        _QWEN_IDS,
        _PATCHES,
    ),
    "Qwen2_5_VL": (
        _QWEN_TEXT,
        _VISION | _QWEN | {"out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        _QWEN_IDS,
        _PATCHES,
    ),
    "Qwen3VL": (
        _QWEN_TEXT | {"head_dim": 16},
        _VISION
        | _QWEN
        | {"out_hidden_size": 64, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        _QWEN_IDS,
        _PATCHES,
    ),
}
"""Per family: text options, vision options, common options, and the image for `generate`."""


def make_image_model(family: str) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    """Returns a model, a prompt that repeats the tokens before its image, and the image."""
    torch.manual_seed(2)
    text, vision, common, image = IMAGE_MODELS[family]
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=vision, **common
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).double().eval()
    num_image_tokens = 10 if family == "LlavaNext" else 4
    prompt = torch.tensor([[5, 6, 7, BEGIN, *[IMAGE] * num_image_tokens, END, 8, 9, 6, 7]])
    image = {
        name: value.double() if value.is_floating_point() else value
        for name, value in image.items()
    }
    if "Qwen" in family and tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 5):
        image["mm_token_type_ids"] = (prompt == IMAGE).int()
    if family == "Gemma3":
        image["token_type_ids"] = (prompt == IMAGE).long()
    return model, prompt, image


_CAUSAL = _TEXT | {
    "head_dim": 16,
    "tie_word_embeddings": False,  # otherwise the model repeats its last token
}
_LONGROPE = {
    "original_max_position_embeddings": 16,
    "rope_scaling": {
        "type": "longrope",
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
    },
}
_DYNAMIC = {
    "max_position_embeddings": 16,
    "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0},
}
_GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
CAUSAL_MODELS: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"n_layer": 2, "n_head": 4},
    "Gemma2ForCausalLM": {"sliding_window": 8},
    "GPT2LMHeadModel": _GPT2,
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 9},
    "Phi3ForCausalLM": {"sliding_window": 9},
    "Qwen3ForCausalLM": {},
}
UNSUPPORTED_MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic": ("LlamaForCausalLM", _DYNAMIC, "depend on the length"),
    "longrope": ("LlamaForCausalLM", _LONGROPE, "depend on the length"),
    "gpt": ("OpenAIGPTLMHeadModel", _GPT2, "prepares its inputs itself"),
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


def make_causal_model(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(1)
    model_class = getattr(transformers, name)
    return model_class(model_class.config_class(**_CAUSAL | settings)).double().eval()
