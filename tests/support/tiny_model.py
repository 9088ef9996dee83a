"""A tiny Llama for the engine tests, made and trained on this machine: nothing is downloaded.

Trained on the sources of the Python standard library and on text that repeats a passage, it
repeats itself enough that drafts are accepted, and is sure enough of its tokens that rounding does
not decide between two of them. Run as a script it writes the model into the folder it is given.
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


def cached(folder: Path) -> Path:
    """The model's folder below ``folder``, made if it is missing."""
    recipe = Path(__file__).read_bytes()
    recipe += "".join(
        importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")
    ).encode()
    model = folder / f"tiny-llama-{hashlib.sha256(recipe).hexdigest()[:12]}"
    return made_once(model, [__file__])


def made_once(folder: Path, command: list[str]) -> Path:
    """``folder``, made by a Python command with its path, unless it is there. In a process of its
    own, to keep torch's threads and settings out of the engine's process."""
    from filelock import FileLock

    with FileLock(folder.with_suffix(".lock")):  # other tests run at the same time
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            subprocess.run([sys.executable, *command, str(unfinished)], check=True)
            unfinished.rename(folder)
    return folder


def corpus() -> str:
    """About 3 MB of Python, the same on every run with the same Python."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stat().st_size < 60_000)
    return "\n".join(path.read_text(errors="replace") for path in files)[:3_000_000]


def _make(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    # One thread: the same model with the same torch on any machine. Several threads that wait
    # for each other would also be slow while other work runs.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = corpus()
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
    fast = PreTrainedTokenizerFast(
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
    chooser = random.Random(0)
    started = time.monotonic()
    loss = torch.zeros(())
    for step in range(TRAIN_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, step / 30) * (1.02 - step / TRAIN_STEPS)
        batch = torch.tensor([_example(ids, chooser) for _ in range(_BATCH)])
        # Anywhere in the window, so that the model learns long contexts.
        positions = chooser.randrange(MAX_MODEL_LEN - _LENGTH) + torch.arange(_LENGTH)[None]
        loss = model(input_ids=batch, labels=batch, position_ids=positions).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"tiny model: step {step}, loss {loss.item():.2f}", flush=True)
    print(f"tiny model: {time.monotonic() - started:.0f} s, loss {loss.item():.2f}")
    model.save_pretrained(folder)
    fast.save_pretrained(folder)


def _example(ids: list[int], chooser: random.Random) -> list[int]:
    """Mostly a repeated passage, so that the model learns to copy; else plain text."""
    start = chooser.randrange(len(ids) - _LENGTH)
    if chooser.random() < 0.25:
        return ids[start : start + _LENGTH]
    span = chooser.randrange(8, 48)
    lead = ids[start : start + chooser.randrange(1, 24)]
    passage = ids[start + len(lead) : start + len(lead) + span]
    return (lead + passage * (_LENGTH // span + 1))[:_LENGTH]


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
