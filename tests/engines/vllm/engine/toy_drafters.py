"""Neural drafters for the tiny target model, made of its first layer, which predicts half of the
target's tokens. One layer cannot copy passages, so both are good where n-grams are bad, and vice
versa.

Arguments as a script: the kind, the target's folder, and the output folder.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

KINDS = ("draft_model", "eagle")


def cached(kind: str, target: Path) -> Path:
    """Returns the drafter's folder next to its target's; makes the drafter if it is missing."""
    from tiny_model import made_once

    recipe = hashlib.sha256(Path(__file__).read_bytes() + target.name.encode()).hexdigest()[:12]
    folder = target.parent / f"tiny-{kind}-{recipe}"
    return made_once(folder, [__file__, kind, str(target)])


def target_with_mtp(tokenizer: Path, folder: Path) -> Path:
    """Writes the config of a target with its own drafter. vLLM gives both random weights, so the
    drafter cannot predict the text."""
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def _make(kind: str, target: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32).requires_grad_(False)
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder)
    if kind == "draft_model":
        for path in target.glob("tokenizer*"):
            shutil.copy(path, folder)
        return
    # An EAGLE head has no norm before its layer, and reads the next token's embedding and the
    # target's hidden state. This one ignores the state. The norm, which is nearly linear because
    # all embeddings have about the same size, becomes a part of the projections.
    (layer,) = model.model.layers
    embeddings = model.model.embed_tokens.weight
    size = embeddings.pow(2).mean(-1).sqrt().mean()
    for projection in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, projection).weight *= layer.input_layernorm.weight / size
    weights = {f"layers.0.{name}": value for name, value in layer.state_dict().items()}
    del weights["layers.0.input_layernorm.weight"]
    identity = torch.eye(embeddings.shape[1])
    weights["fc.weight"] = torch.cat([identity, torch.zeros_like(identity)], 1)
    save_file(weights, folder / "model.safetensors")


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3] / "support"))
    _make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
