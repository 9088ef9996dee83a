"""The CPU kernels on numpy arrays. They copy no array and release the GIL while they run.

The arguments of an operator (docs/ops) have the names and defaults of the torch operator's; `help`
shows them. Keyword-only arguments may also be passed by position, in the same order.

Arrays are int32 unless stated otherwise, contiguous in their inner dimension (the outer stride is
free), aligned, and native-endian; written arrays must be writable. Invalid arguments raise
ValueError with operator, argument, expected and got, before anything is written.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

_Int32 = npt.NDArray[np.int32]
_Int64 = npt.NDArray[np.int64]

__version__: str
compiler: str
MAX_NGRAM: int
MAX_DRAFT_TOKENS: int
MAX_INDEX_SPAN: int

def instruction_set() -> str:
    """The instruction set in use: "scalar", "avx2", "avx512" or "neon"."""

def set_instruction_set(name: str) -> None:
    """Selects the instruction set for the whole process; "auto" selects the widest. ValueError if
    the name is unknown or the machine does not support it."""

def num_threads() -> int:
    """The limit set by :func:`set_num_threads`; 0 means no limit."""

def set_num_threads(limit: int) -> None:
    """Limits every numpy and torch call to ``limit`` threads; 0 removes the limit. Without a limit
    torch uses its own number, and numpy OMP_NUM_THREADS or the cores of this process."""

def workspace_words(op: str, batch: int) -> int:
    """The number of int32 items of workspace that ``op`` needs for a batch on any device; -1 if
    ``op`` takes no workspace."""

INDEX_FAULTS: list[str]
"""Messages by the numbers that index_check and index_check_row return."""
INDEX_PAGE_WORDS: int
INDEX_MAX_SLOTS: int
INDEX_HEADER_PAGES: int
INDEX_HEADER_UNUSED_PAGE: int
INDEX_HEADER_PAGES_IN_USE: int

def index_words(num_slots: int, num_pages: int) -> int:
    """Size in int32 words of an index with that many slots and pages; 0 if that is too large."""

def index_pages(
    tokens: int,
    num_slots: int,
    min_n: int,
    max_n: int,
    any_data: bool,
    ladder: bool = False,
    outcomes: bool = False,
) -> int:
    """Pages that ``tokens`` tokens in ``num_slots`` rows need: for text, or for ``any_data``."""

def index_init(index: _Int32, num_slots: int) -> None:
    """Initialises an empty index from zeroed words. ValueError if there are too few words."""

def index_check(index: _Int32) -> tuple[int, int]:
    """Checks the structure. Returns (number of the violated rule or 0, slot or page)."""

def index_check_row(index: _Int32, slot: int, tokens: _Int32) -> int:
    """Compares a slot with the tokens of its row. Returns the number of the violated rule or 0."""

def index_statistics(index: _Int32) -> dict[str, int]:
    """Returns the counters of an index; they wrap at 2**32."""

CHUNK_ITEMS: int
"""Number of items in a chunk of :func:`pack_rows`."""

def pack_rows(
    rows: list[_Int32], first_chunks: _Int64, min_items: _Int64, split: int
) -> tuple[_Int64, _Int32, int, int]:
    """Packs rows into chunks of CHUNK_ITEMS items, padded with -1.

    Returns the destination chunk indices [C], the chunks [C, CHUNK_ITEMS], the number of chunks of
    the first ``split`` rows, and the minimum item of the other rows. Row i is written from chunk
    first_chunks[i] on and is padded to at least min_items[i] items."""

def join_spans(items: _Int32, begins: _Int64, counts: _Int32) -> _Int32:
    """Returns items[begins[i] : begins[i] + counts[i]] for each i, concatenated."""

class IndexPolicy:
    """Decides when an index is used and how fast it catches up: csrc/cpu/index_policy.h."""

    max_scan_row_capacity: int
    max_scan_context: int
    max_scan_tokens: int
    prefill_index_budget: int
    min_index_budget: int
    steps_to_catch_up: int
    max_absent_steps: int

    def __init__(self) -> None: ...
    def steps_to_index(
        self, step: int, num_tokens: _Int32, num_sampled: _Int32, num_behind: int
    ) -> int:
        """Returns the number of steps for which a step indexes; 0: it scans its rows instead."""

    def steps_to_keep_absent(self, step: int, share_in_use: float, ends_requests: bool) -> int:
        """Returns the number of steps after which absent requests lose their slots; negative: all
        keep them."""

def index_catch_up(policy: IndexPolicy, *arguments: Any) -> tuple[_Int32, int]:
    """Indexes, before a lookup, some of the tokens of rows that their slots do not contain.

    The time spent is 1/32 of a scan of the rows that draft (num_sampled > 0), plus the time that
    rows without a scan save; at least ``policy.min_index_budget`` are indexed. All of this is
    multiplied by ``steps``. If no row drafts, ``policy.prefill_index_budget`` are indexed.

    Arguments: token_ids [>= B,S], num_tokens [B], index, slot_indices [B], num_sampled [B]; min_n,
    max_n, match_policy, ladder, outcomes as in ``ngram_index_append_``; steps. Returns the slots
    for the lookup [B], -1 for rows to scan, and the number of rows to scan."""

STORE_BLOCK_TOKENS: int
STORE_MIN_BLOCKS_PER_SLOT: int
STORE_COST_COLUMNS: int
STORE_PIECE_WORDS: int
STORE_WORDS: dict[str, int]
STORE_FAULTS: list[str]

def store_words(num_slots: int, num_blocks: int, line_bits: int) -> int:
    """Returns the size in int32 words, with 2**line_bits lines; 0 if the sizes are invalid."""

def store_init(
    store: _Int32, num_slots: int, num_blocks: int, line_bits: int, visibility: int
) -> None:
    """Initialises a store from zeroed words. visibility: 0 is "live", 1 is "finish"."""

def store_check(store: _Int32) -> tuple[int, int]:
    """Returns the number of the violated rule or 0, and the slot, block or line."""

def store_statistics(store: _Int32) -> dict[str, int]: ...
def store_parts(num_slots: int, num_blocks: int, line_bits: int) -> dict[str, tuple[int, int]]:
    """Returns begin and end, in words, of "slots", "heads", "lines", "tokens" and "bytes"."""

def store_lock(store: _Int32) -> bool:
    """Locks the store for the caller; False if another call holds the lock."""

def store_unlock(store: _Int32) -> None: ...
def store_pieces(store: _Int32) -> int: ...
def store_pack(store: _Int32, piece: int, to: _Int32) -> int | None:
    """Copies a piece of the store to ``to`` [STORE_PIECE_WORDS]. Returns its size in words; None if
    another call is using the store."""

def store_unpack(store: _Int32, piece: int, packed: bytes) -> int:
    """Adds a piece to an initially empty store; pieces must be in order. Returns the number of a
    fault in STORE_FAULTS or 0."""

def store_clear(store: _Int32, scope: int | None) -> None:
    """Zeroes the text of a scope; None: of all scopes. The caller holds the lock (store_lock)."""

STREAM_CALLBACK: int
"""Address of the function that runs a job of a StreamDrafter: ``void (*)(void* job)``."""

def stream_run(job: int) -> None: ...
def stream_results_bytes(batch: int, k: int) -> int: ...

class StreamDrafter:
    """Drafts in jobs: csrc/cpu/host_drafting.h. Its arrays stay alive while jobs are pending."""

    pending: int
    def __init__(self, **arguments: Any) -> None:
        """num_rows, capacity, max_sampled, lag, sampled [num_rows,1+max_sampled], drafts uint8
        [stream_results_bytes(num_rows, k)], fill, index, store, store_costs, and a lookup's
        arguments."""

    def begin(
        self, row: int, tokens: _Int32, scope: int, stop_tokens: _Int32, *limits: int
    ) -> None:
        """``limits`` are those of ngram_npu.host_drafting.Stop after its tokens, in order."""

    def end(self, row: int) -> None: ...
    def step(self, rows: _Int32) -> int: ...
    def cancel_job(self) -> None: ...
    def results(self, batch: int) -> tuple[int, int, int, int]:
        """Returns the byte offsets in ``drafts`` of a step's numbers, lengths and costs."""

class RowRecognizer:
    """Finds the slot of each row's request: csrc/cpu/row_recognizer.h."""

    row_slots: _Int32
    """The slots of the last step's rows."""

    def __init__(self, num_slots: int) -> None: ...
    def assign(
        self, token_ids: _Int32, num_tokens: _Int32, num_sampled: _Int32
    ) -> tuple[_Int32, _Int64]:
        """Returns the slot of each row [B], all different, and the rows [N] with a new request;
        their slots must be reset. token_ids [>= B,S] already contain the sampled
        tokens; num_tokens and num_sampled [B]. A row with a length outside 0 to S belongs to no
        request. ValueError: more rows than slots."""

    def free_absent_slots(self, steps: int) -> _Int32:
        """Frees the slots of requests that were absent from the last step and from more than
        ``steps`` steps in a row, and returns these slots."""

    def __copy__(self) -> RowRecognizer: ...

def __getattr__(operator: str) -> Any:
    """An operator of csrc/schemas.h, defined from its schema."""
