"""Tests that the doctor's self-test calls every operator, passes on correct kernels, and reports
wrong ones."""

from __future__ import annotations

import json
from typing import Any

import ngram_npu
import numpy as np
import pytest
from backends import TWIN_BACKENDS, Backend, list_available_instruction_sets
from ngram_npu import _C, _library, self_test
from ngram_npu_cli import command as cli
from ops.specs import OPSPECS


def test_correct_kernels_pass_with_every_instruction_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    instruction_set = _C.instruction_set()
    assert cli.main(["doctor", "--self-test", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    results = {(r["operator"], r["device"]): r["problem"] for r in report["self_test"]}
    on_cpu = [device for _, device in results if device not in ("cuda", "npu")]
    assert set(on_cpu) == set(list_available_instruction_sets())
    assert len(on_cpu) == len(set(on_cpu)) * len(OPSPECS)
    assert {operator for operator, _ in results} == OPSPECS.keys()
    assert set(results.values()) == {""}
    assert _C.instruction_set() == instruction_set
    assert ngram_npu.doctor().self_test == ()


def test_calls_are_equal_in_every_process() -> None:
    first, second = list(self_test.make_calls()), list(self_test.make_calls())
    for (op, arguments), (other_op, other_arguments) in zip(first, second, strict=True):
        assert op == other_op
        for name, value in arguments.items():
            assert np.array_equal(value, other_arguments[name]), (op, name)


@pytest.mark.parametrize("op", OPSPECS)
def test_wrong_result_on_the_cpu_is_reported(
    op: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The operator writes a wrong value with the widest instruction set."""
    name, stock = list_available_instruction_sets()[-1], getattr(_C, op)
    if name == "scalar":
        pytest.skip("there is no instruction set to compare with the scalar one")
    outputs = [n for n, kind in OPSPECS[op].arguments if "!" in kind and n != "workspace"]

    def call_wrong_kernel(*args: Any, **arguments: Any) -> Any:
        results = stock(*args, **arguments)
        if _C.instruction_set() == name:
            written = results[-1] if results else arguments[outputs[0]]
            written.reshape(-1)[-1] ^= 1
        return results

    monkeypatch.setattr(_C, op, call_wrong_kernel)
    assert cli.main(["doctor", "--self-test"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (state,) = (line for line in lines if line.startswith("self-test") and f"{op}," in line)
    assert "scalar equal" in state
    assert f"{name} FAILED" in state
    (problem,) = (line for line in lines if line.startswith("PROBLEM"))
    assert f"self-test: {op} on {name}: call 1: " in problem
    assert "values differ from the scalar CPU kernel's" in problem


def test_error_of_a_kernel_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**arguments: Any) -> None:
        raise RuntimeError("the launch failed\n  on device 0")

    monkeypatch.setattr(self_test, "list_devices", lambda: ["other"])
    monkeypatch.setattr(self_test, "run_on_device", lambda device, op, arguments: fail())
    problems = ngram_npu.doctor(self_test=True).problems
    assert len(problems) == len(OPSPECS)
    expected = "call 1: RuntimeError: the launch failed on device 0"
    assert problems[0] == f"self-test: ngram_propose on other: {expected}"


@pytest.mark.parametrize("backend", TWIN_BACKENDS, ids=lambda backend: backend.name)
def test_device_kernels_pass_on_the_twins(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin's kernels take the place of those of torch's CPU."""
    monkeypatch.setattr(self_test, "list_devices", lambda: ["cpu"])
    with backend.select():
        results = {r.operator: r for r in self_test.run_self_test() if r.device == "cpu"}
    assert results.keys() == OPSPECS.keys()
    assert [result.problem for result in results.values()] == [""] * len(OPSPECS)


def test_devices_without_kernels_are_not_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"cuda": _library.Backend("cuda", kernels=13, reason="there is no CUDA driver")}
    monkeypatch.setattr(_library, "backends", lambda: states)
    monkeypatch.setattr(_library, "open_npu", lambda: _library.Backend("npu"))
    assert self_test.list_devices() == []
