"""Tests the example of the feed: that its script runs, and that the parts of its Kubernetes
manifest match each other and the options."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ngram_npu.engines.vllm.feed.addresses import Publisher, parse_publishers

ROOT = Path(__file__).resolve().parents[4]
LABELS = {"app": "vllm"}


def load_manifests() -> dict[str, Any]:
    """Returns the objects of the manifest by their kind."""
    text = (ROOT / "examples/feed/kubernetes.yaml").read_text()
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def test_replicas_of_manifest_read_the_ports_that_they_publish_at() -> None:
    manifests = load_manifests()
    (container,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    arguments = dict(a.lstrip("-").split("=", 1) for a in container["args"] if "=" in a)
    events = json.loads(arguments["kv-events-config"])
    section = json.loads(arguments["additional-config"])["ngram_npu"]
    port, replay_port = (
        int(events[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")
    )
    service = manifests["Service"]
    name = service["metadata"]["name"]
    assert parse_publishers(section["store_feed"]) == (Publisher(name, port, replay_port),)
    assert [p["port"] for p in service["spec"]["ports"]] == [port, replay_port]
    assert {port, replay_port} < {p["containerPort"] for p in container["ports"]}
    assert service["spec"]["clusterIP"] == "None"
    assert events["enable_kv_cache_events"] is True


def test_network_policy_lets_only_replicas_reach_the_events() -> None:
    manifests = load_manifests()
    template = manifests["Deployment"]["spec"]["template"]
    policy = manifests["NetworkPolicy"]["spec"]
    assert template["metadata"]["labels"] == LABELS
    assert policy["podSelector"]["matchLabels"] == LABELS
    assert manifests["Service"]["spec"]["selector"] == LABELS
    event_ports = {p["port"] for p in manifests["Service"]["spec"]["ports"]}
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        for rule in policy[direction]:
            if event_ports & {p["port"] for p in rule["ports"]}:
                assert rule[peers] == [{"podSelector": {"matchLabels": LABELS}}]


@pytest.mark.slow
def test_script_prints_more_tokens_per_step_with_the_feed() -> None:
    command = [sys.executable, "-m", "examples.feed.one_machine"]
    output = subprocess.check_output(command, cwd=ROOT, text=True, timeout=600)
    figures = [float(number) for number in re.findall(r"(\d+\.\d+) (?:tokens|with)", output)]
    assert len(figures) == 4
    without, fed, without_same, fed_same = figures
    assert without < fed
    assert 2 * without_same < fed_same
