"""A draft model for the tiny target model, trained on this machine in seconds. It predicts frequent
next tokens. Its single layer does not learn to copy passages, so it is good where n-grams are bad,
and vice versa.

Arguments as a script: the target's folder, and the output folder.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import sys
from pathlib import Path

TRAIN_STEPS = 80
_BATCH, _LENGTH = 8, 128


def find_or_train_drafter(target: Path) -> Path:
    """Returns the drafter's folder next to the target's. Trains the drafter if it is missing."""
    from tiny_model import create_once

    recipe = hashlib.sha256(Path(__file__).read_bytes() + target.name.encode()).hexdigest()[:12]
    return create_once(target.parent / f"tiny-drafter-{recipe}", [__file__, str(target)])


def _train(target: Path, folder: Path) -> None:
    """Trains the drafter on the target's most likely next tokens."""
    import torch
    from tiny_model import read_corpus
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(1)
    target_model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(target).encode(read_corpus()[:1_500_000])
    config = LlamaConfig.from_pretrained(target)
    config.update({"num_hidden_layers": 1, "intermediate_size": 192})
    model, rng = LlamaForCausalLM(config), random.Random(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(TRAIN_STEPS):
        starts = [rng.randrange(len(ids) - _LENGTH) for _ in range(_BATCH)]
        batch = torch.tensor([ids[start : start + _LENGTH] for start in starts])
        with torch.no_grad():
            targets = target_model(batch).logits.argmax(-1)
        logits = model(input_ids=batch).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, step / 30) * (1.02 - step / TRAIN_STEPS)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    print(f"toy drafter: loss {loss.item():.2f}", flush=True)
    model.save_pretrained(folder)
    for path in target.glob("tokenizer*"):
        shutil.copy(path, folder)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3] / "support"))
    _train(Path(sys.argv[1]), Path(sys.argv[2]))
