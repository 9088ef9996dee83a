"""A tiny Llama that is trained on this machine in seconds; nothing is downloaded.

The model reads ASCII and is trained on repetitive logs, so some drafts are accepted and some are
rejected, and a token depends on keys and values of many earlier tokens. Tests run the model in
float64, so that rounding does not change a token. As a script, this file trains the model and
writes it to the given folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import random
import sys
import time
from pathlib import Path

CACHE_FOLDER = Path(__file__).resolve().parents[2] / "build" / "tiny-model"
MAX_LENGTH = 512
STOP_TOKEN = 0
TRAIN_STEPS = 150
_BATCH, _LENGTH = 16, 64


def find_or_train_model(folder: Path = CACHE_FOLDER) -> Path:
    """Returns the model's folder below `folder`. If it is missing, a separate process trains it,
    and other test processes wait."""
    from support.tiny_model import create_once

    recipe = Path(__file__).read_bytes()
    recipe += "".join(importlib.metadata.version(n) for n in ("torch", "transformers")).encode()
    model = folder / f"tiny-bytes-{hashlib.sha256(recipe).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    return create_once(model, [__file__])  # runs this file as a script with the folder as argument


def make_transcript(rng: random.Random, length: int) -> bytes:
    """Returns an agent's log: each call names a tool and an id, and its result repeats them."""
    lines = []
    while sum(map(len, lines)) < length:
        tool = rng.choice(("read", "write", "list", "find"))
        call = f"{tool}({rng.choice('abcdefgh')}{rng.randrange(10, 100)})"
        lines.append(f"> {call}\n{call} {rng.choice(('ok', 'no'))}\n")
    return "".join(lines).encode()[:length]


def _train_model(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = random.Random(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=MAX_LENGTH,
            bos_token_id=1,
            eos_token_id=STOP_TOKEN,
            pad_token_id=STOP_TOKEN,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.monotonic()
    for step in range(TRAIN_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 8e-3 * min(1.0, step / 20) * (1.05 - step / TRAIN_STEPS)
        batch = torch.tensor([list(make_transcript(rng, _LENGTH)) for _ in range(_BATCH)])
        positions = rng.randrange(MAX_LENGTH - _LENGTH) + torch.arange(_LENGTH)[None]
        loss = model(input_ids=batch, labels=batch, position_ids=positions).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"tiny model: {time.monotonic() - started:.0f} s, loss {loss.item():.2f}")
    model.save_pretrained(folder)
    vocab = {chr(byte): byte for byte in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    _train_model(Path(sys.argv[1]))
