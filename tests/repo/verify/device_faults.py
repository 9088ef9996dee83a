"""Defines faults of the device kernels' synchronization: barriers, fences, atomics, events, waits.

The twins must detect each fault. Mutation tools make faults of single tokens and statements; most
of these faults are larger, such as a weaker barrier or two exchanged writes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from twins import ROOT


@dataclass(frozen=True)
class Fault:
    file: str
    """Relative to the project's root."""
    description: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    mode: str = ""
    """The model of the CUDA twin that detects the fault."""
    op: str = ""
    """The operator whose samples a CUDA kernel runs on."""

    @property
    def name(self) -> str:
        return f"{self.op or Path(self.file).name}: {self.description}"

    def apply(self) -> str:
        """Returns the file's text with the fault.

        Raises:
            ValueError: ``old`` does not occur exactly once.
        """
        text = (ROOT / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: old text: expected 1 occurrence in {self.file}, got "
                f"{text.count(self.old)}; adapt the fault to the changed kernel"
            )
        return text.replace(self.old, self.new)


def parse_faults(text: str) -> list[Fault]:
    """Reads a list of faults. ``@ file mode op`` begins the faults of a file. A fault is either
    ``description: old => new``, or ``description`` followed by the lines of the old text, each
    after ``- ``, and of the new text, each after ``+ ``."""
    faults: list[Fault] = []
    for section in text.split("\n@ ")[1:]:
        header, *lines = section.splitlines()
        file, mode, op = header.split()
        changes: dict[str, tuple[list[str], list[str]]] = {}
        description = ""
        for line in filter(None, lines):
            if line[0] in "-+":
                changes[description][line[0] == "+"].append(line[2:])
                continue
            description, _, change = line.partition(": ")
            old, _, new = change.partition(" =>")
            changes[description] = ([old], [new[1:]]) if change else ([], [])
        for description, (removed, added) in changes.items():
            old, new = "\n".join(removed), "\n".join(added)
            faults.append(Fault(file, description, old, new, mode, op))
    return faults


CUDA_FAULTS = parse_faults("""
@ csrc/cuda/launch.cu fast prepare_inputs
failed launch returns success: return kLaunchFailed; => return kOk;

@ csrc/cuda/launch.cuh fast prepare_inputs
launch status is ignored
-   return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
+   cudaLaunchKernelEx(&config, kernel, arguments...);
+   return kOk;

@ csrc/cuda/store.cu hooks store_append_
plain store instead of the atomic maximum of the newest position
- atomicMax(&entry[kNewest], position);
+ entry[kNewest] = larger(entry[kNewest], position);
plain store instead of the atomic maximum of the second newest position
- atomicMax(&entry[kSecond], smaller(entry[kNewest], position));
+ entry[kSecond] = larger(entry[kSecond], smaller(entry[kNewest], position));
second newest position becomes the newest
- atomicMax(&entry[kSecond], smaller(entry[kNewest], position));
+ atomicMax(&entry[kSecond], entry[kNewest]);
copy and maximum are in one launch
- atomicMax(&entry[kNewest], position);
+ atomicMax(&entry[kSecond], entry[kNewest]); atomicMax(&entry[kNewest], position);
second newest position is stored after the newest was written
- atomicMax(&entry[kNewest], position);
+ entry[kSecond] = atomicMax(&entry[kNewest], position);
every block of the third launch writes the next block number
-   if (i == 0 && thread == 0) p.allocator[kNextNumber] =
+   if (thread == 0) p.allocator[kNextNumber] =
first launch writes the word that it reads
-   if (threadIdx.x == 0) p.allocator[kPlannedNumber] =
+   if (threadIdx.x == 0) p.allocator[kNextNumber] =
n-gram is looked up in the launch that inserts n-grams
-   if (thread == 0) finish_append(p, append, i);
+   if (thread == 0) finish_append(p, append, i);
+   const int32_t* const entry = find_entry(p, append, row, seed_of_scope(scope), append.count, 0);
+   if (thread == 0 && entry != nullptr && *entry < 0) p.slots[slot_of(p, i)][kSlotLength] = 0;
block is read in the launch that writes blocks
-   const StoreAppend append = static_cast<const StoreAppend*>(p.workspace)[i];
+   StoreAppend append = static_cast<const StoreAppend*>(p.workspace)[i];
+   if (append.block > 0) append.fill = begin_append(p, i).fill;

@ csrc/cuda/store.cu fast store_append_
copy is not launched
- if (status == kOk) status = launch(store_copy_kernel
+ if (status != kOk) status = launch(store_copy_kernel

@ csrc/core/store.h fast store_append_
scope is not in the key
- static_cast<int64_t>(key_of(ngram_hash, seed, level) & last_column)
+ static_cast<int64_t>(key_of(ngram_hash, 0, level) & last_column)
text of the replaced block stays
- return append.num_blocks > 0 ? room_of(append) + append.num_blocks * kBlockTokens : append.count;
+ return append.count;
row that grew elsewhere continues
- slot[kSlotRowLength] == num_old && stored >= 0
+ stored >= 0
text of the private scope is stored
- p.num_sampled[i] <= 0 || scope == kPrivateScope || !p.token_ids.has(row) || !p.slots
+ p.num_sampled[i] <= 0 || !p.token_ids.has(row) || !p.slots

@ csrc/core/store.h fast store_propose_
scope is not compared: head[kNumber] == number && has_scope => head[kNumber] == number
only half of the scope is compared
- head[kScopeLow] == static_cast<int32_t>(scope) &&
+ head[kScopeLow] == static_cast<int32_t>(scope) ||
text behind the fill is drafted
- fill_of(contents, found.row) - found.offset;
+ kBlockTokens - found.offset;
predecessor is used without a check
- find_block(contents, contents.blocks[found.row][kPrevious], query.scope);
+ ring_row(contents, contents.blocks[found.row][kPrevious]);
successor is used without a check
- find_block(contents, contents.blocks[found.row][kNext], query.scope);
+ ring_row(contents, contents.blocks[found.row][kNext]);
invalid id is drafted
- if (!is_valid_token(contents.text[found.row][found.offset], p.vocab_size))
+ if (false)

@ csrc/cuda/store.cu hooks store_propose_
match length is written before all lanes have read it
-     __syncwarp();
-     if (draft.match_len > 0) {
+     if (draft.match_len > 0) {

@ csrc/cuda/store.cu fast store_propose_
tokens before the second newest position are not compared
- draft.second = find_valid_occurrence(second_position, n);
+ draft.second = find_occurrence(p_, query_, second_position, n);
invalid ids after the first one are drafted
- is_valid_token(newest[j], p_.vocab_size);
+ newest[j] >= INT32_MIN;

@ csrc/cuda/correction.cu fast correct_num_computed_tokens_
barrier of a warp only
- corrected_counts(p, i));
-   __syncthreads();
+ corrected_counts(p, i));
+   __syncwarp();

@ csrc/cuda/correction.cu hooks correct_spec_state_
old counts are loaded as constant
- thread] = corrected_counts(p.counts, thread)
+ thread] = (__ldg(p.counts.num_computed_tokens + thread), corrected_counts(p.counts, thread))

@ csrc/cuda/correction.cu fast correct_spec_state_
counter is not zeroed
- const int32_t status = zero_workspace(p.workspace, kCorrectSpecStateWorkspaceWords, stream);
+ const int32_t status = kOk;
every block finalizes: &staged.is_last)) return; => &staged.is_last)) {}
no barrier in a grid of one block: if (!is_last_block( => if (gridDim.x > 1 && !is_last_block(

@ csrc/cuda/launch.cuh hooks correct_spec_state_
arrival does not release: __NV_ATOMIC_ACQ_REL => __NV_ATOMIC_ACQUIRE
arrival does not acquire: __NV_ATOMIC_ACQ_REL => __NV_ATOMIC_RELEASE
arrival has block scope: __NV_THREAD_SCOPE_DEVICE => __NV_THREAD_SCOPE_BLOCK

@ csrc/cuda/lookup.cuh fast ngram_propose
each lane decides alone to merge: if (longest == 0) return; => if (best_ == 0) return;

@ csrc/cuda/lookup.cuh hooks ngram_propose
best match is merged without an atomic
- if (lane() == 0) atomicMax(&block_.best, rank);
+ if (lane() == 0 && rank > block_.best) block_.best = rank;

@ csrc/cuda/lookup.cuh fast ngram_step_
all requests share one workspace: join_blocks(workspaces[i], => join_blocks(workspaces[0],
workspace is not zeroed
- const int32_t status = zero_workspace(p.workspace, lookup_workspace_words(p.batch), stream);
+ const int32_t status = kOk;
workspace of one request is not zeroed
- zero_workspace(p.workspace, lookup_workspace_words(p.batch), stream);
+ zero_workspace(p.workspace, lookup_workspace_words(p.batch - 1), stream);
every block of a request writes the results
- block.is_last = arrive_last(workspace);
+ block.is_last = arrive_last(workspace) || true;
every block of a row with one share grows the row
- if (gridDim.y > 1 && !arrive_last(workspaces[i])) return;
+ if (gridDim.y > 1) arrive_last(workspaces[i]);
row grows before all blocks have read its length
- const bool is_joined
+ if (thread == 0) lookup.grow_row(i);
+   const bool is_joined
last block in the grid is taken for the last block that finishes
- arrive(&workspace.num_arrived) + 1 == gridDim.y
+ blockIdx.y + 1 == gridDim.y

@ csrc/cuda/lookup.cuh resident ngram_step_
counter is incremented before the rank is published
-     if (block.best != 0) atomicMax(&workspace.best, block.best);
-     block.is_last = arrive_last(workspace);
+     block.is_last = arrive_last(workspace);
+     if (block.best != 0) atomicMax(&workspace.best, block.best);
one of two concurrent ranks is lost
- if (block.best != 0) atomicMax(
+ if (block.best > *static_cast<volatile Rank*>(&workspace.best)) atomicExch(

@ csrc/cuda/lookup.cuh hooks ngram_step_
best rank is read before all blocks have arrived
-     if (block.best != 0) atomicMax(&workspace.best, block.best);
-     block.is_last = arrive_last(workspace);
-     if (block.is_last) block.joined_best = workspace.best;
+     block.joined_best = larger<Rank>(block.best, atomicMax(&workspace.best, block.best));
+     block.is_last = arrive_last(workspace);
joined rank is loaded as constant
- block.joined_best = workspace.best;
+ block.joined_best = __ldg(&workspace.best);
joined rank replaces the rank that threads still read
- block.joined_best = workspace.best;
+ block.joined_best = block.best = workspace.best;

@ csrc/cuda/launch.cuh hooks ngram_step_
counter without atomics
- return __nv_atomic_fetch_add(num_arrived, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
+ return (*static_cast<volatile uint32_t*>(num_arrived))++;

@ csrc/cuda/launch.cuh resident ngram_step_
arrival is relaxed: __NV_ATOMIC_ACQ_REL => __NV_ATOMIC_RELAXED
arrival has block scope: __NV_THREAD_SCOPE_DEVICE => __NV_THREAD_SCOPE_BLOCK

@ csrc/cuda/ngram_step.cu fast ngram_step_
length grows before all blocks have read it
-     if (lane == 0) {
+     if (lane == 0 && p.advance && accepted.num_appended > 0)
+       p.num_tokens[row.row] += static_cast<int32_t>(accepted.num_appended);
+     if (lane == 0) {

@ csrc/cuda/ngram_step.cu hooks ngram_step_
every block of a request appends: blockIdx.y == 0 && lane => lane
""")


_BARRIER_OPS = {
    "bookkeeping.cu": ["prepare_inputs"],
    "correction.cu": ["correct_num_computed_tokens_", "correct_spec_state_"],
    "launch.cuh": ["correct_spec_state_", "correct_spec_state_", "prepare_inputs"],
    "lookup.cuh": ["ngram_propose"] * 4,
    "store.cu": ["store_append_"],
}
"""Per file with barriers: the operator whose samples detect that the n-th barrier is missing."""


def leave_out_each(pattern: str, file: Path) -> list[Fault]:
    """Returns one fault per line of ``file`` with a call that ``pattern`` matches, which leaves out
    the call. The first group of ``pattern`` names the call."""
    text = file.read_text()
    counts: Counter[str] = Counter()
    faults = []
    for match in re.finditer(rf"^.*\b{pattern}\(\);.*\n", text, re.MULTILINE):
        begin = match.start()
        while text.count(text[begin : match.end()]) > 1:  # the old text must be unique
            begin = text.rindex("\n", 0, begin - 1) + 1
        counts[match[1]] += 1
        new = text[begin : match.start()] + match[0].replace(match[0].strip(), ";")
        description = f"{match[1]} {counts[match[1]]} left out"
        name = str(file.relative_to(ROOT))
        faults.append(Fault(name, description, text[begin : match.end()], new))
    return faults


CUDA_FAULTS += [
    replace(fault, mode="hooks" if name == "store.cu" else "fast", op=op)
    for name, ops in _BARRIER_OPS.items()
    for fault, op in zip(
        leave_out_each("(__syncthreads)", ROOT / "csrc/cuda" / name), ops, strict=True
    )
]
ASCENDC_FAULTS = parse_faults("""
@ csrc/ascendc/store.cpp ascendc store_append_
plain copy instead of the atomic maximum:     AscendC::SetAtomicMax<int32_t>(); =>
atomic mode is not reset:     AscendC::SetAtomicNone(); =>
scope is not in the key of inserted n-grams
- seed_of_scope(scope_of(p_.scopes, part.i))
+ seed_of_scope(0)
n-gram is looked up in the launch that inserts n-grams
-         ++count;
+         if (word == kSecond || entries_[count][kNewest] >= 0) ++count;
copy and maximum are in one launch
-     sync_pipes<AscendC::HardEvent::MTE3_S>();
-     AscendC::SetAtomicNone();
+     for (int64_t n = 0; word == kSecond && n < count; ++n)
+       values_.store(n * kUnitItems, entries_[n] + kNewest, 1);
+     sync_pipes<AscendC::HardEvent::MTE3_S>();
+     AscendC::SetAtomicNone();
second newest position may equal the newest
- smaller(newest_.get(unit), positions_[n])
+ newest_.get(unit)
block head is written by two cores: if (part.is_first) writer. => writer.
every request of a launch gets the same blocks: next_ += append.num_blocks; =>
text of a replaced block remains: if (num_zeros > 0) => if (num_zeros < 0)

@ csrc/ascendc/store.cpp ascendc store_propose_
scope is not in the key of looked up n-grams: seed_of_scope(queries_[j].scope) => seed_of_scope(0)
tokens in the block of a position are not compared
- if (text_end[-1 - t] != end[-1 - t])
+ if (n < 0)
tokens in the block before are not compared
- if (ngram_token(p_.contents, found, t) != end[-1 - t])
+ if (n < 0)

@ csrc/core/store.h ascendc store_propose_
scope is not compared: return head[kNumber] == number && has_scope => return head[kNumber] == number
""")

# ``sync_pipes<...>`` sets a flag and waits for it.
ASCENDC_SYNC_FAULTS = [
    fault
    for file in sorted((ROOT / "csrc" / "ascendc").iterdir())
    if file.suffix in {".h", ".cpp"}
    for fault in leave_out_each(r"sync_pipes<AscendC::HardEvent::(\w+)>", file)
]
