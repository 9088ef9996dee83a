"""Tests the benchmark of engines that share traffic."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.ops import vllm_fleet


def test_engines_take_as_many_steps_as_simulated_replicas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(vllm_fleet, "NUM_REPLICAS", (1, 2))
    rng = random.Random(1)
    phrases = [" ".join(str(rng.randrange(1000)) for _ in range(40)) for _ in range(4)]
    with (tmp_path / "set.jsonl").open("w") as file:
        for i in range(12):
            turns = [{"prompt": f"{i}", "completion": phrases[i % 4]}, {"prompt": f"{i}."}]
            turns[1]["completion"] = phrases[(i + 1) % 4]
            file.write(json.dumps({"turns": turns}) + "\n")
    output = tmp_path / "out.json"
    assert main(["vllm-fleet", "--data", str(tmp_path / "set.jsonl"), "--json", str(output)]) == 0
    (result,) = json.loads(output.read_text())["results"]
    alone, separate = result["replicas_1"]["silo"], result["replicas_2"]["silo"]
    for replay in alone, separate:
        simulated, engine = (replay[key]["tokens_per_step"] for key in ("simulated", "engine"))
        assert engine == pytest.approx(simulated, rel=0.05)
    fed = result["replicas_2"]["fed"]
    assert fed["engine"]["tokens_per_step"] > 1.1 * separate["engine"]["tokens_per_step"]
    assert fed["feed"]["tokens_total"] > 0
    assert fed["feed"]["rejected_total"] == 0
