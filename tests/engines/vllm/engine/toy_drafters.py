"""Neural drafters for the tiny target model, trained on this machine in seconds: a draft model and
an EAGLE head. Both drafters predict frequent next tokens. Their single layer does not learn to copy
passages, so they are good where n-grams are bad, and vice versa.

Arguments as a script: a key of `TRAIN_STEPS`, the target's folder, and the output folder.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

TRAIN_STEPS = {"draft_model": 80, "eagle": 200}
_BATCH, _LENGTH = 8, 128


def find_or_train_drafter(kind: str, target: Path) -> Path:
    """Returns the drafter's folder next to the target's. Trains the drafter if it is missing."""
    from tiny_model import create_once

    recipe = hashlib.sha256(Path(__file__).read_bytes() + target.name.encode()).hexdigest()[:12]
    folder = target.parent / f"tiny-{kind}-{recipe}"
    return create_once(folder, [__file__, kind, str(target)])


def _make_batches(target: Path, kind: str) -> Any:
    """Yields for each training step the tokens, the target's hidden states after its last norm, and
    the most likely next tokens."""
    import torch
    from tiny_model import read_corpus
    from transformers import AutoTokenizer, LlamaForCausalLM

    target_model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(target).encode(read_corpus()[:1_500_000])
    rng = random.Random(1)
    for _ in range(TRAIN_STEPS[kind]):
        starts = [rng.randrange(len(ids) - _LENGTH) for _ in range(_BATCH)]
        batch = torch.tensor([ids[start : start + _LENGTH] for start in starts])
        with torch.no_grad():
            output = target_model(batch, output_hidden_states=True)
        yield batch, output.hidden_states[-1], output.logits.argmax(-1)


def _train_parameters(parameters: Any, losses: Any, steps: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for step, loss in enumerate(losses):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, step / 30) * (1.02 - step / steps)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"toy drafter: step {step}, loss {loss.item():.2f}", flush=True)


def _compute_loss(logits: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _train_draft_model(target: Path, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(target)
    config.update({"num_hidden_layers": 1, "intermediate_size": 192})
    model = LlamaForCausalLM(config)
    losses = (
        _compute_loss(model(input_ids=batch).logits, targets)
        for batch, _, targets in _make_batches(target, "draft_model")
    )
    _train_parameters(model.parameters(), losses, TRAIN_STEPS["draft_model"])
    model.save_pretrained(folder)
    for path in target.glob("tokenizer*"):
        shutil.copy(path, folder)


def _train_eagle(target: Path, folder: Path) -> None:
    """Trains one layer on the target's hidden state and the next token's embedding. The target's
    head turns the layer's output into logits."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    target_model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    target_model.requires_grad_(False)
    config = target_model.config
    layer = LlamaDecoderLayer(config, 0)
    layer.input_layernorm = torch.nn.Identity()
    fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
    positions = target_model.model.rotary_emb(torch.zeros(1), torch.arange(_LENGTH - 1)[None])

    def compute_losses() -> Any:
        for batch, hidden, targets in _make_batches(target, "eagle"):
            embeddings = target_model.model.embed_tokens(batch[:, 1:])
            inputs = fc(torch.cat([embeddings, hidden[:, :-1]], dim=-1))
            logits = target_model.lm_head(layer(inputs, position_embeddings=positions))
            yield _compute_loss(logits, targets[:, 1:])

    parameters = [*layer.parameters(), *fc.parameters()]
    _train_parameters(parameters, compute_losses(), TRAIN_STEPS["eagle"])
    folder.mkdir(parents=True)
    weights = {f"layers.0.{name}": value for name, value in layer.state_dict().items()}
    save_file({**weights, "fc.weight": fc.weight.detach()}, folder / "model.safetensors")
    drafter_config = json.loads((target / "config.json").read_text())
    drafter_config |= {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(drafter_config))


if __name__ == "__main__":
    import torch

    sys.path.append(str(Path(__file__).parents[3] / "support"))
    torch.set_num_threads(1)
    torch.manual_seed(1)
    {"draft_model": _train_draft_model, "eagle": _train_eagle}[sys.argv[1]](
        Path(sys.argv[2]), Path(sys.argv[3])
    )
