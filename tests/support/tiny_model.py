"""Tiny Llamas that are trained on this machine; nothing is downloaded.

Both models repeat text, so that drafts are accepted, and their token probabilities differ so much
that rounding changes no token. The model of the engine tests reads the sources of the Python
standard library. The model of the example runner and of transformers is trained in seconds: it
reads ASCII, one byte per token, and its text is an agent's log. As a script, this file trains a
model and writes it to a folder.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import random
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "build" / "tiny-model"
VOCAB_SIZE = 1024
MAX_MODEL_LEN = 2048
STOP_TOKEN = 0
"""The token that ends a log."""
_SPECIAL = ["<unk>", "<s>", "</s>"]


def get_model_folder(folder: Path = FOLDER, name: str = "python") -> Path:
    """Returns the folder of a model, "python" or "log", below ``folder``; creates the model if it
    is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Path(__file__).read_bytes()
    recipe += "".join(
        importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
    ).encode()
    model = folder / f"tiny-{name}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    return create_once(model, [__file__, name])


def create_once(folder: Path, command: list[str]) -> Path:
    """Returns ``folder``. If it is missing, a Python command with its path as last argument creates
    it. A separate process keeps torch's threads and settings out of the engine's process."""
    from filelock import FileLock

    with FileLock(folder.with_suffix(".lock")):  # concurrent test processes may need the folder
        if not folder.exists():
            temporary_folder = folder.with_suffix(".unfinished")
            shutil.rmtree(temporary_folder, ignore_errors=True)
            subprocess.run([sys.executable, *command, str(temporary_folder)], check=True)
            temporary_folder.rename(folder)
    return folder


def read_corpus() -> str:
    """Returns about 3 MB of Python sources, which are equal in every run with the same Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size < 60_000)
    return "\n".join(path.read_text(errors="replace") for path in files)[:3_000_000]


def make_log(rng: random.Random, length: int) -> bytes:
    """Returns an agent's log: each call names a tool and an id, and its result repeats them."""
    lines = []
    while sum(map(len, lines)) < length:
        tool = rng.choice(("read", "write", "list", "find"))
        call = f"{tool}({rng.choice('abcdefgh')}{rng.randrange(10, 100)})"
        lines.append(f"> {call}\n{call} {rng.choice(('ok', 'no'))}\n")
    return "".join(lines).encode()[:length]


def make_prompts(count: int = 24, seed: int = 1) -> list[list[int]]:
    """Returns prompts for the model of logs, of very different lengths."""
    rng = random.Random(seed)
    return [list(make_log(rng, rng.randint(1, 90))) for _ in range(count)]


def pad_left(prompts: list[list[int]]) -> dict[str, Any]:
    """Returns the prompts as one batch for transformers."""
    import torch

    longest = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[0] * (longest - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts]),
    }


def _train_on_python(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text, length = read_corpus(), 128
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:400_000]], trainer)
    ids = tokenizer.encode(text[:1_500_000]).ids

    def make_example(rng: random.Random) -> list[int]:
        """Returns a repeated passage, so that the model learns to copy, or else plain text."""
        start = rng.randrange(len(ids) - length)
        if rng.random() < 0.25:
            return ids[start : start + length]
        span = rng.randrange(8, 48)
        prefix = ids[start : start + rng.randrange(1, 24)]
        passage = ids[start + len(prefix) : start + len(prefix) + span]
        return (prefix + passage * (length // span + 1))[:length]

    model = _train(
        make_example,
        steps=600,
        batch=8,
        rates=(4e-3, 30, 0.02),
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=320,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
        eos_token_id=2,
    )
    unknown, bos, eos = _SPECIAL
    special = {"unk_token": unknown, "bos_token": bos, "eos_token": eos}
    _save(model, tokenizer, folder, **special, model_max_length=MAX_MODEL_LEN)


def _train_on_logs(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(vocab={chr(byte): byte for byte in range(128)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    model = _train(
        lambda rng: list(make_log(rng, 64)),
        steps=150,
        batch=16,
        rates=(8e-3, 20, 0.05),
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=STOP_TOKEN,
        pad_token_id=STOP_TOKEN,
    )
    _save(model, tokenizer, folder)


def _train(
    make_example: Callable[[random.Random], list[int]],
    *,
    steps: int,
    batch: int,
    rates: tuple[float, int, float],
    **options: Any,
) -> Any:
    """Trains a Llama with these options.

    Args:
        rates: the highest learning rate, the number of steps until then, and the share of it that
            remains after the last step.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    # With a fixed number of threads, the same torch trains the same model on any machine. The test
    # processes wait for the model, so two threads are free.
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=2, bos_token_id=1, tie_word_embeddings=True, **options)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(0)
    start = time.monotonic()
    loss = torch.zeros(())
    highest_rate, warm_up_steps, last_share = rates
    for step in range(steps):
        for group in optimizer.param_groups:
            decay = min(1.0, step / warm_up_steps) * (1 + last_share - step / steps)
            group["lr"] = highest_rate * decay
        tokens = torch.tensor([make_example(rng) for _ in range(batch)])
        # Random positions in the context window let the model learn long contexts.
        length = tokens.shape[1]
        begin = rng.randrange(config.max_position_embeddings - length)
        positions = begin + torch.arange(length)[None]
        loss = model(input_ids=tokens, labels=tokens, position_ids=positions).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"tiny model: {time.monotonic() - start:.0f} s, loss {loss.item():.2f}")
    return model


def _save(model: Any, tokenizer: Any, folder: Path, **special: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


if __name__ == "__main__":
    {"python": _train_on_python, "log": _train_on_logs}[sys.argv[1]](Path(sys.argv[2]))
