"""Models the times of the AscendC kernels on a 910B; nothing here was measured on an NPU.

The host twin (docs/design/ascendc-twin.md) runs the kernels and counts bytes, instructions and
accesses per pipe and core. The times are computed from these counts and the parameters in
``MODEL``. The parameters of vector instructions and copies are Huawei's figures for the A2 and A3,
published in the cost model of pto-isa (arch_config.hpp and a2a3/cce_costmodel in
include/pto/costmodel, commit 3186c381bd49 of 21 August 2026). Latencies and scalar costs have no
public figure.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ngram_npu import _library

from tests.support.twins import compute_ascendc_plan, load_kernels
from tools.bench.data import Workload, make_workload
from tools.bench.measure import round_digits
from tools.bench.ops import spec_state
from tools.bench.ops.base import Op, Result, SkipReasons
from tools.bench.ops.lookup import find_torch_op
from tools.bench.options import BenchError, Options, Size

CLOCK_HZ = 1.85e9
GM_BYTES_PER_SECOND = 1.6e12
CORES = 48
UB_BYTES = 192 * 1024
SHORT_ROWS = (Size(1, 300), Size(1, 2048), Size(16, 2048))
SHORT_ROWS_CAPACITY = 128 * 1024
PADDED_SLOTS = 8192
"""Slots of a captured graph, most of which are padding."""
Call = Callable[[], object]
ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, its unit, and the source of its value."""

    value: float
    unit: str
    source: str


_INI = "CANN's platform_config/Ascend910B1.ini"
_PTO = "Huawei's pto-isa, a2a3"
_ASSUMPTION = "assumption: no public figure found"
# The order is that of CostModel (tests/twins/ascendc/core.h).
MODEL: dict[str, Parameter] = {
    "copy_bytes_per_cycle": Parameter(
        100.9 * 2**30 / CLOCK_HZ,
        "bytes/cycle, one core",
        f"{_PTO}: GM_TO_UB of 100.9 GiB/s at 1.85 GHz; stores are faster (188.46 GiB/s)",
    ),
    "gm_bytes_per_cycle": Parameter(
        GM_BYTES_PER_SECOND / CLOCK_HZ,
        "bytes/cycle, all cores",
        f"1.6 TB/s of HBM, the 910B's published bandwidth, at {_INI}: cube_freq=1850",
    ),
    "copy_latency": Parameter(
        1000, "cycles from a copy's last byte until a waiting pipe continues", _ASSUMPTION
    ),
    "vector_startup": Parameter(
        40,
        "cycles per vector instruction",
        f"{_PTO}: 24 cycles before and after an Add measured on a 910B3 (6 to 33 for other "
        "instructions), and 16 for counter mode, which calls with a count use; paid by every "
        "instruction, because most depend on the previous one",
    ),
    "vector_repeat": Parameter(
        2,
        "cycles per 256 bytes",
        f"{_PTO}: 2 for comparisons, And, Or, Add, Mul, Max, shifts, conversions and reductions; "
        "1 for Adds, Muls, Maxs, Mins and Duplicate",
    ),
    "gather_repeat": Parameter(
        12.8,
        "cycles per 256 bytes gathered",
        "the devkit's guide: 5 elements per cycle; pto-isa's 2 is marked as not verified",
    ),
    "issue": Parameter(20, "cycles of the scalar unit per issued instruction", _ASSUMPTION),
    "scalar_ub": Parameter(4, "cycles per scalar access to UB", _ASSUMPTION),
    "scalar_gm": Parameter(4, "cycles per scalar load in the cache", _ASSUMPTION),
    "scalar_gm_miss": Parameter(500, "cycles per scalar load not in the cache", _ASSUMPTION),
    "sync": Parameter(20, "cycles per flag or barrier", _ASSUMPTION),
    "same_line": Parameter(
        16,
        "cycles per copy at the most contended 512 bytes of memory, added to the launch",
        f"{_ASSUMPTION}: 512 bytes at {_INI}'s ddr_rate=32. The devkit's guide: such copies are "
        "serialized",
    ),
}
LAUNCH_US = Parameter(3, "us from one launch on a stream to the next", _ASSUMPTION)
"""The time to read a kernel's arguments and to start its cores; not part of ``model_us``."""
WORK_PARAMETERS = ("copy_bytes_per_cycle", "gm_bytes_per_cycle", "vector_repeat", "gather_repeat")
"""The parameters of ``work_us``, which contains bytes and repeats, no latencies or overheads."""

_COUNT_NAMES = (
    "gm_to_ub_bytes", "ub_to_gm_bytes", "copies", "vector_instructions", "vector_repeats",
    "scalar_ub", "scalar_gm", "scalar_gm_misses", "syncs", "cycles", "launches", "blocks",
)  # fmt: skip

BOOKKEEPING = (
    "prepare_next_token_ids", "prepare_inputs_padded", "prepare_inputs",
    "correct_num_computed_tokens_", "compute_slot_mapping_", "correct_spec_state_",
    "prepare_input_ids_",
)  # fmt: skip


class Twin:
    """The library with the AscendC kernels on the host twin, which can replace the CPU kernels."""

    def __init__(self) -> None:
        folder = os.environ.get("NGRAM_NPU_TWINS", ROOT / "build" / "twins" / "lib")
        self.path = Path(folder) / "libngram_npu_ascendc_twin.so"
        if not self.path.exists():
            raise BenchError(f"{self.path} does not exist: run `make twins`")
        self._library = ctypes.CDLL(str(self.path))
        self._library.ngram_npu_ascendc_twin_set_cores.argtypes = [ctypes.c_int64]
        self._library.ngram_npu_ascendc_twin_set_lookup.argtypes = [ctypes.c_int64] * 2

    @contextmanager
    def replace_cpu(self) -> Iterator[None]:
        """Within the block, the operators use the twin instead of the CPU kernels."""
        try:
            load_kernels("ascendc", "cpu", self.path)
            yield
        finally:
            self._library.ngram_npu_ascendc_twin_set_cores(0)
            load_kernels("cpu", "cpu", _library.cpu_library_path())

    @contextmanager
    def override_plan(self, *, spans: int) -> Iterator[None]:
        """Within the block, lookups divide a row into this many spans."""
        self._library.ngram_npu_ascendc_twin_set_lookup(spans, 0)
        try:
            yield
        finally:
            self._library.ngram_npu_ascendc_twin_set_lookup(0, 0)

    def count_costs(self, call: Call, model: list[float]) -> dict[str, Any]:
        """Returns the counts and the modelled cycles of a call on an NPU with ``CORES`` cores."""
        self._library.ngram_npu_ascendc_twin_set_cores(CORES)
        self._library.ngram_npu_ascendc_twin_set_model((ctypes.c_double * len(model))(*model))
        out = (ctypes.c_double * len(_COUNT_NAMES))()
        self._library.ngram_npu_ascendc_twin_take_cost(out)  # resets the counts
        call()
        self._library.ngram_npu_ascendc_twin_take_cost(out)
        return dict(zip(_COUNT_NAMES, out, strict=True))


class AscendcModel(Op):
    name = "ascendc-model"
    help = "modelled times of the AscendC kernels on a 910B; nothing is timed"
    sizes = ("1x8k", "1x128k", "16x128k", "128x8k", "128x32k")
    assumptions: Mapping[str, Any] = {
        "what": "a model of a 910B with the host twin's counts; no NPU was used",
        "cores": CORES,
        "clock_hz": CLOCK_HZ,
        "figures": {name: vars(parameter) for name, parameter in MODEL.items()},
        "launch": vars(LAUNCH_US),
        "left_out": "L2 hits, bank conflicts, scalar arithmetic, branches; launches in model_us",
    }

    def run(self, options: Options, skip_reasons: SkipReasons) -> Iterator[Result]:
        twin = Twin()
        with twin.replace_cpu():
            for size in self.select_sizes(options):
                for kind in ("nomatch", "periodic"):
                    data = make_workload(size, replace(options, data_kind=kind))
                    yield from model_lookups(twin, data, options)
            for size in () if options.sizes else SHORT_ROWS:
                data = make_short_rows(size, replace(options, data_kind="nomatch"))
                yield from model_lookups(twin, data, options)
            for batch in () if options.sizes else (1, 128, 1024):
                for op, call in make_bookkeeping(Size(batch, 4096), options.k).items():
                    yield {"op": op, "size": f"{batch} requests", **model_call(twin, call)}
            for op, call in make_bookkeeping(Size(8, 4096), options.k, PADDED_SLOTS).items():
                if op in ("compute_slot_mapping_", "correct_spec_state_"):
                    size = f"8 requests, {PADDED_SLOTS} slots"
                    yield {"op": op, "size": size, **model_call(twin, call)}
            for order in ("longest first", "in random order", "spread over the cores"):
                yield model_uneven_rows(twin, order, replace(options, data_kind="nomatch"))


def model_uneven_rows(twin: Twin, order: str, options: Options) -> Result:
    """Returns the entry of ngram_propose for rows of 64 to 32k tokens. A core searches neighbouring
    rows. Spread, the neighbours are a long, a middle and a short row."""
    data = make_workload(Size(128, 32 * 1024), options)
    lengths = np.geomspace(data.size.context, 64, data.size.batch).astype(np.int32)
    if order == "in random order":
        lengths = np.random.default_rng(2026).permutation(lengths)
    if order == "spread over the cores":
        rows_per_core = -(-data.size.batch // CORES)
        cores = -(-data.size.batch // rows_per_core)
        rows = np.arange(rows_per_core * cores).reshape(rows_per_core, cores).T.ravel()
        lengths = lengths[rows[rows < data.size.batch]]
    data = replace(data, lengths=lengths[None])
    call = make_lookups(data, options)["ngram_propose"]
    result = model_lookup(twin, "ngram_propose", call, data, options)
    return result | {"size": f"128 rows of 64 to 32k, {order}"}


def make_short_rows(size: Size, options: Options) -> Workload:
    """Returns short rows in a buffer with room for ``SHORT_ROWS_CAPACITY`` tokens per row."""
    data = make_workload(size, options)
    tokens = np.zeros((size.batch, SHORT_ROWS_CAPACITY), np.int32)
    tokens[:, : data.capacity] = data.token_ids
    return replace(data, token_ids=tokens)


def model_call(twin: Twin, call: Call) -> dict[str, Any]:
    """Returns a call's counts and modelled times. ``floor_us`` is the time to copy the call's bytes
    at full bandwidth; for lookups, it is the time to read the live tokens (`model_lookup`)."""
    work_model = [p.value if name in WORK_PARAMETERS else 0.0 for name, p in MODEL.items()]
    counts = twin.count_costs(call, [parameter.value for parameter in MODEL.values()])
    work_cycles = twin.count_costs(call, work_model)["cycles"]
    copied_bytes = counts["gm_to_ub_bytes"] + counts["ub_to_gm_bytes"]
    model_us = _convert_to_us(counts.pop("cycles"))
    return {
        "model_us": model_us,
        "with_launches_us": round_digits(model_us + counts["launches"] * LAUNCH_US.value),
        "work_us": _convert_to_us(work_cycles),
        "floor_us": round_digits(copied_bytes / GM_BYTES_PER_SECOND * 1e6),
        "counts": {name: int(count) for name, count in counts.items()},
    }


def model_lookups(twin: Twin, data: Workload, options: Options) -> Iterator[Result]:
    for op, call in make_lookups(data, options).items():
        yield model_lookup(twin, op, call, data, options)


def model_lookup(twin: Twin, op: str, call: Call, data: Workload, options: Options) -> Result:
    """Returns a lookup's entry in the results file. Live tokens are the tokens within the rows'
    lengths. ``read_per_live_byte`` includes the results of the first launch that the second launch
    reads; ``tokens_read_per_live_token`` does not."""
    num_live = int(data.lengths[0].sum())
    sizes = {"batch": data.size.batch, "capacity": data.capacity, "k": options.k}
    plan = compute_ascendc_plan(op, sizes, CORES, UB_BYTES)
    assert plan is not None
    result = model_call(twin, call)
    counts = result["counts"]
    floor_us = num_live * 4 / GM_BYTES_PER_SECOND * 1e6
    read_bytes = counts["gm_to_ub_bytes"]
    tokens_read = (read_bytes - plan["workspace_bytes"]) / 4
    scalar_accesses = counts["scalar_ub"] + counts["scalar_gm"]
    return {
        "op": op,
        "size": str(data.size) + (" in 128k" if data.capacity == SHORT_ROWS_CAPACITY else ""),
        "data_kind": data.description["kind"],
        **result,
        "floor_us": round_digits(floor_us),
        "model_to_floor": round_digits(result["model_us"] / floor_us),
        "read_per_live_byte": round_digits(read_bytes / (num_live * 4)),
        "tokens_read_per_live_token": round_digits(tokens_read / num_live),
        "scalar_accesses_per_live_token": round_digits(scalar_accesses / num_live),
        "work_to_floor": round_digits(result["work_us"] / floor_us),
    }


def make_lookups(data: Workload, options: Options) -> dict[str, Call]:
    """Returns a call per lookup operator."""
    import torch

    tokens, sampled = torch.from_numpy(data.token_ids), torch.from_numpy(data.sampled[0])
    lengths = torch.from_numpy(data.lengths[0].copy())
    propose, step = find_torch_op("ngram_propose"), find_torch_op("ngram_step_")
    lookup = options.lookup
    return {
        "ngram_propose": lambda: propose(tokens, lengths, **lookup),
        "ngram_step_": lambda: step(tokens, lengths, sampled, advance=False, **lookup),
    }


def make_bookkeeping(size: Size, k: int, num_slots: int | None = None) -> dict[str, Call]:
    """Returns a call per bookkeeping operator, for a batch with ``k`` drafts per request.
    ``num_slots`` is the size of slot_mapping (default: the number of tokens)."""
    import torch

    batch, total = size.batch, size.batch * (k + 1)
    rng = np.random.default_rng(2026)
    arrays = spec_state.make_state(size, k, steps=1) | {
        "sampled_token_ids": rng.integers(0, 1000, (batch, k + 1)).astype(np.int32),
        "backup_token_ids": np.zeros(batch, np.int32),
        "cu_num_draft_tokens": np.arange(k, batch * k + 1, k, dtype=np.int32),
        "num_sampled": rng.integers(1, k + 2, batch).astype(np.int32),
        "num_rejected": rng.integers(0, k + 1, batch).astype(np.int32),
        "input_ids": np.zeros(total, np.int32),
        "next_token_ids": np.zeros(batch, np.int32),
        "draft_token_ids": rng.integers(0, 1000, (batch, k)).astype(np.int32),
        "num_scheduled_drafts": np.full(batch, k, np.int32),
        "slot_mapping": np.zeros(num_slots or total, np.int64),
    }
    tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in arrays.items()}
    optional_arguments = {name: tensors[name] for name in ("discard", "num_tokens")}
    other_arguments: dict[str, dict[str, Any]] = {
        "prepare_next_token_ids": {"backup_token_ids": tensors["backup_token_ids"]},
        "prepare_inputs": {"total_tokens": total},
        "compute_slot_mapping_": spec_state.LAYOUT,
        "correct_spec_state_": optional_arguments | spec_state.LAYOUT,
        "prepare_input_ids_": {"pad_token": -1},
    }
    calls: dict[str, Call] = {}
    for op in BOOKKEEPING:
        function = find_torch_op(op)
        required = [a.name for a in function._schema.arguments if not a.has_default_value()]
        arguments = {name: tensors[name] for name in required if name in tensors}
        arguments |= other_arguments.get(op, {})
        calls[op] = partial(function, **arguments)
    return calls


def _convert_to_us(cycles: float) -> float:
    return round_digits(cycles / CLOCK_HZ * 1e6)
