"""Reading replay files: what is accepted; every error names file and line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ngram_npu_cli.logs import files as files_module
from ngram_npu_cli.replay import Conversation, InputError, Turn, load_inputs, read_conversations

Write = Callable[..., Path]

GOOD = {"id": "a", "turns": [{"prompt": "p", "completion": "c"}]}
IDS = {"id": 7, "turns": [{"prompt_token_ids": [1, 2], "completion_token_ids": []}]}


def talk(*turns: Any) -> dict[str, Any]:
    return {"id": "x", "turns": list(turns)}


def of_ids(prompt: Any, completion: Any) -> dict[str, Any]:
    return talk({"prompt_token_ids": prompt, "completion_token_ids": completion})


@pytest.mark.parametrize("name", ["talk.jsonl", "talk.jsonl.gz", "talk.json"])
def test_reads(write_jsonl: Write, name: str) -> None:
    path = write_jsonl(GOOD, b"", IDS, b"  ", name=name)
    assert read_conversations(path) == [
        Conversation("a", (Turn("p", "c"),), f"{path}:1"),
        Conversation("7", (Turn(prompt_token_ids=(1, 2), completion_token_ids=()),), f"{path}:3"),
    ]


def test_no_final_newline_byte_order_mark_and_unknown_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    line = '{"id": "ü", "model": "m", "turns": [{"prompt": "", "completion": "", "t": 0}]}'
    path.write_bytes(line.encode("utf-8-sig"))
    assert read_conversations(path) == [Conversation("ü", (Turn("", ""),), f"{path}:1")]


def test_limit_stops_reading(write_jsonl: Write) -> None:
    path = write_jsonl(GOOD, GOOD, b"not JSON")
    assert len(read_conversations(path, limit=2)) == 2
    with pytest.raises(InputError, match=":3: not JSON"):
        read_conversations(path, limit=3)


BAD_LINES = [
    (b"{", "not JSON: .* at column [12]$"),
    (b'{"id": "a"} {}', "not JSON: Extra data at column 13"),
    (b"[" * 100_000, "not JSON that can be read"),
    (b'{"id": ' + b"1" * 5000 + b"}", "not JSON that can be read"),
    (b'{"id": "\xff"}', "not UTF-8: invalid start byte at byte 9"),
    (b"[]", "expected an object, got an array"),
    (b"null", "expected an object, got null"),
    ({"turns": []}, '"turns" is empty; read as turns, of which this works: {"turns": '),
    ({"id": "a"}, 'no format has these keys: "id"; this would work: {"messages": '),
    ({"id": "a", "turns": {}}, '"turns" must be an array, got an object'),
    (talk("hello"), r"turns\[0\] must be an object, got a string"),
    (talk({"prompt": "p"}), r'turns\[0\]: missing key "completion"'),
    (talk({"completion": "p"}), r'turns\[0\]: missing key "prompt"'),
    (talk({}), r'turns\[0\]: missing key "prompt"'),
    (talk(GOOD["turns"][0], {"prompt": 1, "completion": ""}), r"turns\[1\].prompt must be .* 1"),
    (talk({"prompt": "", "completion": None}), r"turns\[0\].completion must be .* null"),
    (b'{"id":"a","turns":[{"prompt":"\\ud800","completion":""}]}', "prompt: lone surrogate"),
    (talk({"prompt_token_ids": [1]}), 'missing key "completion_token_ids"'),
    (
        talk({"prompt": "p", "completion": "c", "completion_token_ids": [1]}),
        'missing key "prompt_token_ids"',
    ),
    (of_ids("1", []), "prompt_token_ids must be an array of integers, got a string"),
    (of_ids([1, 1.5], []), r"prompt_token_ids\[1\] must be an integer, got the number 1.5"),
    (of_ids([], [True]), r"completion_token_ids\[0\] must be an integer, got a boolean"),
    (of_ids([-1], []), r"prompt_token_ids\[0\] is -1, outside"),
    (of_ids([2**31], []), r"prompt_token_ids\[0\] is 2147483648, outside"),
    (talk(GOOD["turns"][0], IDS["turns"][0]), "some turns carry token ids and some do not"),
]


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize(("line", "message"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_named(
    write_jsonl: Write, line: object, message: str, compressed: bool
) -> None:
    path = write_jsonl(GOOD, b"", line, name="bad.jsonl.gz" if compressed else "bad.jsonl")
    with pytest.raises(InputError, match=message) as caught:
        read_conversations(path)
    assert str(caught.value).startswith(f"{path}:3: ")
    assert "\n" not in str(caught.value)


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b'{"id": "a", "turns": []}\n')
    with pytest.raises(InputError, match=r"x.jsonl.gz:1: damaged gzip data: this is not gzip"):
        read_conversations(path)

    # Two members, the second one truncated: two lines are complete.
    line = b'{"id": "a", "turns": [{"prompt": "p", "completion": "c"}]}\n'
    path.write_bytes(gzip.compress(line * 2) + gzip.compress(line)[:-9])
    with pytest.raises(InputError, match=r"x.jsonl.gz:[34]: damaged gzip data"):
        read_conversations(path)

    whole = bytearray(gzip.compress(line * 2))
    whole[-6] ^= 1  # the checksum
    path.write_bytes(whole)
    with pytest.raises(
        InputError, match=r"x.jsonl.gz:1: damaged gzip data: .*incorrect data check"
    ):
        read_conversations(path)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_file_that_was_flushed_line_by_line_and_cut(tmp_path: Path, kind: str) -> None:
    """All lines before the cut can be read, which is why the end must be checked."""
    if kind == "zst":
        packer: Any = pytest.importorskip("zstandard").ZstdCompressor().compressobj()
        flush = packer.flush(1)  # COMPRESSOBJ_FLUSH_BLOCK
    else:
        packer = zlib.compressobj(wbits=31)
        flush = b""
    packed = flush
    for n in range(500):
        line = json.dumps({**GOOD, "id": n}).encode() + b"\n"
        packed += packer.compress(line) + packer.flush(1 if kind == "zst" else zlib.Z_SYNC_FLUSH)
        if n == 299:
            cut = len(packed)
    whole = packed + packer.flush()
    path = tmp_path / f"traffic.jsonl.{kind}"
    path.write_bytes(whole)
    assert len(read_conversations(path)) == 500
    for size in (cut, len(packed), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(InputError, match="the file ends before the data does"):
            read_conversations(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_a_line_has_a_limit(write_jsonl: Write, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(files_module, "_MAX_LINE_MIB", 1)
    line = b'{"id": "a", "turns": [{"prompt": "p", "completion": "c"}]}'
    longest = line.ljust(1 << 20)
    assert len(read_conversations(write_jsonl(longest, line, longest, name=name))) == 3
    path = write_jsonl(line, longest + b" ", name=name)
    with pytest.raises(InputError, match=f"{path}:2: the line is longer than 1 MiB"):
        read_conversations(path)


def test_a_line_that_is_too_long_is_never_read_whole(
    write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_MAX_LINE_MIB", 1)
    path = write_jsonl(b" " * (32 << 20), name="bomb.jsonl.gz")
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="the line is longer than 1 MiB"):
            read_conversations(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"\n \n"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz"])
def test_an_empty_file_says_so(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(InputError, match=f"{path}: empty, no conversation"):
        read_conversations(path)


def test_paths_that_are_no_replay_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.jsonl: no such file"):
        load_inputs([tmp_path / "nowhere.jsonl"])
    (tmp_path / "notes.txt").write_text("{}")
    (tmp_path / "sub.jsonl").mkdir()
    with pytest.raises(InputError, match=f"{tmp_path}: no replay files"):
        load_inputs([tmp_path])


def test_a_folder_stands_for_its_files_in_the_order_of_names(write_jsonl: Write) -> None:
    for name in ("b.jsonl.gz", "a.jsonl", "c.txt"):
        path = write_jsonl(GOOD, name=name)
    assert [item.name for item in load_inputs([path.parent])] == ["a", "b"]


def test_equal_names_are_told_apart(write_jsonl: Write) -> None:
    one = write_jsonl(GOOD, name="one/talk.jsonl")
    two = write_jsonl(GOOD, name="two/talk.jsonl.gz")
    three = write_jsonl(GOOD, name="three.jsonl")
    names = [item.name for item in load_inputs([one, two, three])]
    assert names == [str(one), str(two), "three"]


def test_an_error_in_the_last_file_shows_before_anything_is_replayed(write_jsonl: Write) -> None:
    good = write_jsonl(GOOD, name="a.jsonl")
    bad = write_jsonl(b"{", name="b.jsonl")
    with pytest.raises(InputError, match=r"b.jsonl:1: not JSON"):
        load_inputs([good, bad])
