"""`ngram-npu generate`: text, figures, trace, and one-line errors."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ngram_npu import NgramConfig, cli
from ngram_npu.runner import Runner, RunnerConfig

pytest.importorskip("transformers")

from ngram_npu.runner import generate

from runner import worlds


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    asked = [bytes(prompt).decode() for prompt in worlds.prompts(3)]
    entries: list[Any] = [
        {"prompt": asked[0]},
        {"request": {"prompt": asked[1]}, "response": {"choices": [{"text": "?"}]}},
        {"prompt_token_ids": list(asked[2].encode())},
    ]
    path.write_text("\n\n".join(json.dumps(entry) for entry in entries))
    return path


def _generate(folder: str, prompts: Path, *more: str) -> int:
    return cli.main(
        ["generate", "--model", folder, "--prompts", str(prompts), "--max-tokens", "40"]
        + ["--dtype", "float64", "--threads", "1", *more]
    )


def test_text_figures_and_trace(
    folder: str, prompts: Path, model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, record = tmp_path / "trace.json", tmp_path / "record.json"
    assert _generate(folder, prompts, "--trace", str(trace), "--json", str(record)) == 0
    found = json.loads(record.read_text())
    plain = worlds.runner(model, ngram=None).generate(worlds.prompts(3), 40, stop_token_ids=[0])
    assert found["token_ids"] == plain
    assert found["texts"] == [bytes(ids).decode() for ids in plain]
    assert found["other_texts"] == 0
    with_drafts, without = found["runs"]["speculation"], found["runs"]["no speculation"]
    assert without["tokens"] == with_drafts["tokens"] == sum(map(len, plain))
    assert without["drafts"] == 0 < with_drafts["accepted"] <= with_drafts["drafts"]
    assert with_drafts["steps"] < without["steps"]
    phases = ["schedule", "begin", "forward", "sample", "draft", "reconcile"]
    assert list(with_drafts["step_ms"]) == phases
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("0: ")
    assert out[-3].split()[:2] == ["no", "speculation"]
    assert out[-1].endswith("x with speculation; all texts the same")
    _check_trace(json.loads(trace.read_text())["traceEvents"], with_drafts["steps"])


def _check_trace(events: list[dict[str, Any]], steps: int) -> None:
    names = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
    spans = [e for e in events if e["ph"] == "X"]
    host = [e for e in spans if e["tid"] == names["host"]]
    device = [e for e in spans if e["tid"] == names["device"]]
    assert {e["name"] for e in device} == {"begin", "forward", "sample", "draft"}
    assert {e["args"]["step"] for e in device} == set(range(steps))
    for first, second in itertools.pairwise(host):
        assert first["ts"] + first["dur"] <= second["ts"] + 0.2  # rounded
    # The host is one step ahead: a step's results arrive after the next step's launch.
    order = [(e["name"], e["args"]["step"]) for e in host]
    assert order.index(("draft", 1)) < order.index(("reconcile", 0)) < order.index(("schedule", 2))


def test_a_trace_grows_only_where_it_is_asked_for(model: Any) -> None:
    runner = Runner(model, RunnerConfig(ngram=NgramConfig(), row_capacity=64))
    runner.generate([[65, 66]], 4)
    assert runner.trace.seconds() == {}


@pytest.mark.parametrize(
    "more",
    [
        ["--synchronous", "--unpadded"],
        ["--sizes", "ladder", "--engine", "index"],
        ["--min-draft-probability", "0.177", "--store", "live"],
    ],
)
def test_options_do_not_change_the_sampled_text(
    folder: str, prompts: Path, tmp_path: Path, more: list[str]
) -> None:
    texts = []
    for options in ([], more, ["--seed", "1"]):
        record = tmp_path / "record.json"
        sampled = ["--temperature", "0.8", "--no-baseline", "--json", str(record)]
        assert _generate(folder, prompts, *sampled, *options) == 0
        texts.append(json.loads(record.read_text())["texts"])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "prompts.jsonl:1: not JSON"),
        ('{"question": "a"}', "prompts.jsonl:1: the request must have"),
        ("[1]", "prompts.jsonl:1: expected an object, got the number 1"),
        ('{"prompt_token_ids": [1, -1]}', "prompts.jsonl:1: prompt_token_ids[1] is -1"),
        (
            '{"prompt_token_ids": [1, 128]}',
            "expected token ids below the model's vocabulary of 128",
        ),
        ('{"prompt_token_ids": []}', "expected 1 to 472 tokens, got 0 to 0"),
        ("", "prompts.jsonl: empty, no prompt in this file"),
        (json.dumps({"prompt": "a" * 500}), "prompts: expected 1 to 472 tokens, got 500 to 500"),
    ],
)
def test_prompts_that_cannot_be_used(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line)
    assert _generate(folder, path) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("ngram-npu generate: error: ")
    assert message in error


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "one\r\n\n[two]\n", ["one", "[two]"]),
        ("a.json", '["one", {"prompt": "two"}]', ["one", "two"]),
        ("a", '[\n{"prompt": "one"},\n"two"]', ["one", "two"]),
        ("a.jsonl.gz", '{"prompt": "one"}\n{"prompt_token_ids": [2]}', ["one", [2]]),
    ],
)
def test_files_of_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, expected: list[Any]
) -> None:
    data = content.encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert generate.read_prompts(path) == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert generate.read_prompts(Path("-")) == expected


def test_messages_in_a_chat_template(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All messages of a request are the prompt; of a recorded conversation, those before the first
    answer. `--prompt` gives the same text as the template's, and `--json -` only JSON."""
    model, path = tmp_path / "model", tmp_path / "chat.json"
    shutil.copytree(folder, model)
    template = "{% for m in messages %}({{ m.role[0] }}){{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    chat = [
        {"role": role, "content": text}
        for role, text in (("user", "list(a10)"), ("assistant", "ok"), ("user", "find(b22)"))
    ]
    path.write_text(json.dumps([{"messages": chat}, {"messages": chat[:2]}]))
    for more, whole, first in (
        ([], "(u)list(a10)(a)ok(u)find(b22)", "(u)list(a10)"),
        (["--chat-template", "none"], "list(a10)\nok\nfind(b22)", "list(a10)"),
    ):
        ids = []
        for asked in (["--prompts", str(path)], ["--prompt", whole], ["--prompt", first]):
            options = ["--max-tokens", "8", "--no-baseline", "--json", "-", *asked, *more]
            assert cli.main(["generate", "--model", str(model), *options]) == 0
            ids.append(json.loads(capsys.readouterr().out)["token_ids"])
        assert ids[0] == ids[1] + ids[2]


def test_what_is_not_there(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text('{"model_type": "llama"}')
    for arguments, message in (
        ((str(tmp_path), prompts), "expected a model's folder, found no config.json"),
        ((str(empty), prompts), "cannot be loaded"),
        ((folder, tmp_path / "none.txt"), "none.txt: No such file or directory"),
        ((folder, prompts, "--max-tokens", "512"), "max_tokens: expected less than the model's"),
        ((folder, prompts, "--trace", str(tmp_path / "no" / "t.json")), "does not exist"),
        ((folder, prompts, "--temperature", "-1"), "Sampling: temperature: expected at least 0"),
        ((folder, prompts, "--temperature", "nan"), "Sampling: temperature: expected at least 0"),
        ((folder, prompts, "--sizes", "ladder", "--engine", "scan"), "AsyncConfig: engine"),
        ((folder, prompts, "--device", "nothing"), "cannot be loaded"),
        *[((folder, prompts, "--device", "cuda"), "cannot be loaded: ")]
        * (not torch.cuda.is_available()),
        ((folder, prompts, "--store", "live"), "NgramConfig: store: expected None without"),
        ((folder, prompts, "--min-n", "6", "--max-n", "3"), "NgramConfig: min_n"),
        ((folder, prompts, "--draft-model", str(tmp_path)), "expected a model's folder, found no"),
    ):
        assert _generate(*arguments) == 2  # type: ignore[arg-type]
        assert message in capsys.readouterr().err


def test_a_draft_model(
    folder: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model drafts for itself."""
    record = tmp_path / "record.json"
    assert _generate(folder, prompts, "--draft-model", folder, "--json", str(record)) == 0
    found = json.loads(record.read_text())
    assert found["other_texts"] == 0
    run, without = found["runs"]["speculation"], found["runs"]["no speculation"]
    assert without["neural_drafts"] == 0 < run["neural_accepted"] <= run["accepted"]
    assert "draft model: " in capsys.readouterr().out


@pytest.mark.parametrize("store", ["live", "finish"])
def test_a_store(folder: str, prompts: Path, tmp_path: Path, store: str) -> None:
    """Of two equal prompts in sequence, the second drafts from the first one's text. Text from
    before the run drafts nothing."""
    path, record, found = tmp_path / "twice.jsonl", tmp_path / "record.json", []
    line = prompts.read_text().splitlines()[0]
    options = ["--min-draft-probability", "0.177", "--batch-size", "1", "--no-baseline"]
    options += ["--json", str(record)]
    for count, more in ((1, []), (1, ["--store", store]), (2, []), (2, ["--store", store])):
        path.write_text("\n".join([line] * count))
        assert _generate(folder, path, *options, *more) == 0
        run = json.loads(record.read_text())
        found.append((run["token_ids"], run["runs"]["speculation"]["steps"]))
    once, stored, twice, shared = found
    if store == "finish":  # the only request finds nothing in it
        assert stored[1] == once[1]
    assert once[0] * 2 == stored[0] * 2 == twice[0] == shared[0]
    assert shared[1] < min(twice[1], 2 * stored[1])


def test_plain_text(folder: str, model: Any, tmp_path: Path) -> None:
    path, record = tmp_path / "prompts.txt", tmp_path / "record.json"
    path.write_text("> read(a10)\n\n> list(b22)\n")
    assert _generate(folder, path, "--no-baseline", "--json", str(record)) == 0
    asked = [list(b"> read(a10)"), list(b"> list(b22)")]
    plain = worlds.runner(model, ngram=None).generate(asked, 40, stop_token_ids=[0])
    assert json.loads(record.read_text())["token_ids"] == plain
    assert json.loads(record.read_text())["other_texts"] is None
    assert torch.get_num_threads() == 1
