"""A tiny Llama for the engine tests, which is trained on this machine; nothing is downloaded.

The model is trained on the sources of the Python standard library and on text that repeats a
passage. It therefore repeats text so often that drafts are accepted, and its token probabilities
differ so much that rounding changes no token. As a script, this file writes the model to a folder.
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
from pathlib import Path

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 2048
TRAIN_STEPS = 600
_BATCH, _LENGTH = 8, 128
_SPECIAL = ["<unk>", "<s>", "</s>"]


def get_model_folder(folder: Path) -> Path:
    """Returns the model's folder below ``folder``; creates the model if it is missing."""
    recipe = Path(__file__).read_bytes()
    recipe += "".join(
        importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
    ).encode()
    model = folder / f"tiny-llama-{hashlib.sha256(recipe).hexdigest()[:12]}"
    return create_once(model, [__file__])


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


def _train(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # With one thread, the same torch trains the same model on any machine. Several threads that
    # wait for each other would also be slow while other work runs.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = read_corpus()
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
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=MAX_MODEL_LEN,
    )
    ids = tokenizer.encode(text[:1_500_000]).ids

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=MAX_MODEL_LEN,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=True,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(0)
    start = time.monotonic()
    loss = torch.zeros(())
    for step in range(TRAIN_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, step / 30) * (1.02 - step / TRAIN_STEPS)
        batch = torch.tensor([_make_example(ids, rng) for _ in range(_BATCH)])
        # Random positions in the context window let the model learn long contexts.
        positions = rng.randrange(MAX_MODEL_LEN - _LENGTH) + torch.arange(_LENGTH)[None]
        loss = model(input_ids=batch, labels=batch, position_ids=positions).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"tiny model: step {step}, loss {loss.item():.2f}", flush=True)
    print(f"tiny model: {time.monotonic() - start:.0f} s, loss {loss.item():.2f}")
    model.save_pretrained(folder)
    fast_tokenizer.save_pretrained(folder)


def _make_example(ids: list[int], rng: random.Random) -> list[int]:
    """Returns a repeated passage, so that the model learns to copy text, or else plain text."""
    start = rng.randrange(len(ids) - _LENGTH)
    if rng.random() < 0.25:
        return ids[start : start + _LENGTH]
    span = rng.randrange(8, 48)
    prefix = ids[start : start + rng.randrange(1, 24)]
    passage = ids[start + len(prefix) : start + len(prefix) + span]
    return (prefix + passage * (_LENGTH // span + 1))[:_LENGTH]


if __name__ == "__main__":
    _train(Path(sys.argv[1]))
