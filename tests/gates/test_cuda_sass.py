"""The gate on the lookups' machine code, tested with code that it must refuse."""

from __future__ import annotations

import json

import pytest

from tools.cuda_sass import KERNELS, LIMIT, RECORD, measure, parse, problems

GOOD = """
        /*0000*/                   LDG.E R2, desc[UR4][R2.64] ;
.L_x_1:
        /*0010*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64] ;
        /*0020*/              @!P0 LDG.E.128 R12, desc[UR4][R4.64] ;
        /*0030*/              @!P0 LDG.E.128 R16, desc[UR4][R6.64] ;
        /*0040*/              @!P0 LDG.E.128 R20, desc[UR4][R8.64] ;
        /*0050*/                   VOTE.ANY P1, P1 ;
        /*0060*/              @!P1 BRA `(.L_x_2) ;
        /*0070*/                   IADD3 R1, R1, 0x1, RZ ;
.L_x_2:
        /*0080*/               @P2 BRA `(.L_x_1) ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   BRA `(.L_x_3);
"""
MEASURED = {
    "instructions_per_tile": 7,
    "loads_per_tile": 4,
    "global_loads": 5,
    "generic_loads": 0,
    "local_accesses": 0,
    "instructions": 11,
}


def test_the_way_without_a_candidate_is_counted() -> None:
    """An instruction that runs only after a candidate does not count."""
    assert measure(GOOD) == MEASURED
    assert len(parse(GOOD).labels) == 3


def test_a_loop_with_fewer_loads_is_not_the_one_over_tiles() -> None:
    cut = GOOD.replace("LDG.E.128 R20", "LDG.E R20")
    assert measure(cut)["instructions_per_tile"] == 0
    assert measure("")["instructions"] == 0


def test_code_as_recorded_passes() -> None:
    assert problems({"one": MEASURED}, {"one": MEASURED}) == []
    assert problems({"one": MEASURED}, {"one": {}}) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instructions_per_tile": 8}, "8 instructions a tile, expected at most 7"),
        ({"instructions_per_tile": 0}, "0 instructions a tile, expected at most 7"),
        ({"loads_per_tile": 5}, "5 loads a tile, expected 4"),
        ({"generic_loads": 1}, "1 generic loads, expected none"),
        ({"local_accesses": 2}, "2 local accesses, expected none"),
    ],
)
def test_code_that_got_worse_is_refused(change: dict[str, int], message: str) -> None:
    assert problems({"one": MEASURED | change}, {"one": MEASURED}) == [f"one: {message}"]


def test_the_limit_holds_whatever_is_recorded() -> None:
    slow = {"one": MEASURED | {"instructions_per_tile": LIMIT + 1}}
    assert problems(slow, slow) == [
        f"one: {LIMIT + 1} instructions a tile, expected at most {LIMIT}"
    ]
    assert problems({"one": MEASURED}, {}) == ["one: not recorded"]


def test_the_record_is_within_the_limit() -> None:
    record = json.loads(RECORD.read_text())
    assert set(record["kernels"]) == set(KERNELS)
    assert problems(record["kernels"], record["kernels"]) == []


def test_generic_and_local_accesses_are_seen() -> None:
    text = GOOD.replace("LDG.E R2", "LD.E R2").replace("IADD3 R1,", "STL [R1],")
    assert measure(text)["generic_loads"] == 1
    assert measure(text)["local_accesses"] == 1
