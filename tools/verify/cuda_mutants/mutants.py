"""One fault each, that a kernel had or might have. A fault that cannot change what a kernel does
on a GPU has no place here."""

from __future__ import annotations

from tools.verify.cuda_mutants.lookups import ARRIVING, JOIN, LOOKUP
from tools.verify.mutant import Mutant

MUTANTS: list[Mutant] = []


def _of(op: str, file: str, faults: dict[str, tuple[str, str]]) -> None:
    for what, (old, new) in faults.items():
        MUTANTS.append(Mutant(f"{op}: {what}", f"csrc/cuda/{file}", old, new))


_BARRIER = "  __syncthreads();\n"

_ITEMS = {
    "one too many": ("if (i >= count) return;", "if (i > count) return;"),
    "one too few": ("if (i >= count) return;", "if (i >= count - 1) return;"),
    "blocks overlap": ("blockIdx.x} * kItemThreads", "blockIdx.x} * (kItemThreads - kLanes)"),
    "one block": ("blocks_for(count, kItemThreads / kLanes)", "dim3(1)"),
}
for _op in (
    "prepare_next_token_ids",
    "prepare_inputs_padded",
    "prepare_input_ids_",
    "compute_slot_mapping_",
    "ngram_index_reset_",
):
    _of(_op, "launch.cuh", _ITEMS)

_of(
    "merge_drafts_",
    "merge_drafts.cu",
    {
        "one request too many": ("i < p.batch", "i <= p.batch"),
        "one request too few": ("i < p.batch", "i < p.batch - 1"),
        "blocks overlap": ("blockIdx.x} * kThreads", "blockIdx.x} * (kThreads - 1)"),
        "one block": ("cuda::blocks_for(params->batch, cuda::kThreads)", "dim3(1)"),
        "the other width": ("token_bytes == 8", "token_bytes == 4"),
    },
)

_of(
    "prepare_input_ids_",
    "launch.cuh",
    {
        "every lane writes all": ("thread % kLanes, kLanes);", "thread % kLanes, int64_t{1});"),
        "lanes leave gaps": ("thread % kLanes, kLanes);", "thread % kLanes, kItemThreads);"),
        "warps overlap": ("i = thread / kLanes;", "i = thread / (2 * kLanes);"),
    },
)
MUTANTS.append(
    Mutant(
        "prepare_input_ids_: any previous position",
        "csrc/core/prepare_input_ids.h",
        "  if (!p.draft_token_ids.has(prev)) return;\n",
        "",
    )
)

_of(
    "prepare_inputs",
    "prepare_inputs.cu",
    {
        "offsets are read before they are written": (
            "kept_before[thread + 1] = upto;\n  " + _BARRIER,
            "kept_before[thread + 1] = upto;\n",
        ),
        "sums of 32 bits": ("int64_t before = 0;", "int32_t before = 0;"),
        "every chunk begins at nothing": ("before += kept_by_all;", ""),
        "more indices than room": (
            "smaller(kept_before[r + 1], p.total_tokens)",
            "kept_before[r + 1]",
        ),
        "the rest begins one late": ("n = before + thread;", "n = before + thread + 1;"),
        "one request too many": ("i < p.batch) {", "i <= p.batch) {"),
        "indices of the wrong chunk": ("p.query_start_loc[first + r]", "p.query_start_loc[r]"),
        "requests of the last chunk only": ("first += kThreads", "first += kThreads + 1"),
        "lanes leave gaps": ("n < end; n += kWarpSize", "n < end; n += kThreads"),
    },
)
_of(
    "prepare_inputs",
    "launch.cuh",
    {
        "the scan takes a lane too few": ("if (lane >= distance)", "if (lane > distance)"),
        "the scan takes a lane too many": ("if (lane >= distance)", "if (lane >= distance - 1)"),
        "the scan stops early": ("distance < kWarpSize", "distance < kWarpSize / 2"),
        "sums are read before they are written": ("= in_warp;\n" + _BARRIER, "= in_warp;\n"),
        "the last warp's sum is left out": ("lane < warps ?", "lane < warps - 1 ?"),
        "all threads' sum is the first warp's": ("upto, warps - 1);", "upto, 0);"),
        "a warp adds its own sum": ("upto, warp - 1)", "upto, warp)"),
    },
)

_of(
    "correct_num_computed_tokens_",
    "correct_num_computed_tokens.cu",
    {
        "no barrier": (_BARRIER, ""),
        "a warp's barrier": (_BARRIER, "  __syncwarp();\n"),
        "nothing staged": ("stage_counts(p, i, corrected(p, i));", ";"),
        "one request too few": (
            "i < p.batch; i += kThreads) settle",
            "i < p.batch - 1; i += kThreads) settle",
        ),
        "one request too many": (
            "i < p.batch; i += kThreads) settle",
            "i <= p.batch; i += kThreads) settle",
        ),
        "no second round": (
            "i < p.batch; i += kThreads) stage",
            "i < kThreads && i < p.batch; i += kThreads) stage",
        ),
    },
)
_of(
    "correct_num_computed_tokens_",
    "spec_state.cuh",
    {
        "staged without drafts": ("if (counts.accepted_changes) ", ""),
        "accepted before computed": (
            "p.num_computed_tokens[i] = p.num_accepted_tokens[i];\n    "
            "p.num_accepted_tokens[i] = sampled_at(p, drafted);",
            "p.num_accepted_tokens[i] = sampled_at(p, drafted);\n    "
            "p.num_computed_tokens[i] = p.num_accepted_tokens[i];",
        ),
        "accepted without a bound": ("sampled_at(p, drafted)", "p.num_sampled_prev[drafted]"),
        "position 0 counts as none": ("if (drafted < 0)", "if (drafted <= 0)"),
    },
)

_of(
    "compute_slot_mapping_",
    "spec_state.cuh",
    {
        "the other width": ("slot_bytes == 8", "slot_bytes == 4"),
        "the next request's first token": (
            "query_start_loc[middle] > n",
            "query_start_loc[middle] >= n",
        ),
        "the request before": ("return low - 1;", "return low - 2;"),
        "one offset too many": ("high = batch + 1;", "high = batch + 2;"),
        "one offset too few": ("high = batch + 1;", "high = batch;"),
        "writes before the first request": ("if (request < 0) return;", ""),
        "padding as a request": ("request < p.batch && ", ""),
        "positions beyond the last": (" && n < p.num_positions", ""),
        "padding is -1": ("  if (slot == kNoSlot) slot = p.pad_id;\n", ""),
    },
)

_of(
    "correct_spec_state_",
    "correct_spec_state.cu",
    {
        "old counts read as constant": (
            "held.num_computed[thread] = corrected(p.counts, thread).num_computed;",
            "held.num_computed[thread] = (__ldg(p.counts.num_computed_tokens + thread), "
            "corrected(p.counts, thread).num_computed);",
        ),
        "offsets are read before they are written": (
            "p.slots.query_start_loc[0];\n" + _BARRIER,
            "p.slots.query_start_loc[0];\n",
        ),
        "a batch of one more than the block holds": (
            "p.slots.batch <= kThreads;",
            "p.slots.batch <= kThreads + 1;",
        ),
        "the first offset is not held": (
            "  if (thread == 0) held.starts[0] = p.slots.query_start_loc[0];\n",
            "",
        ),
        "the wrong request's count": (
            "held.num_computed[request])",
            "held.num_computed[0])",
        ),
        "the counter is not zeroed": (
            "  if (gridDim.x > 1 && thread == 0) *static_cast<uint32_t*>(p.workspace) = 0;\n",
            "",
        ),
        "every block settles": ("&held.last)) return;", "&held.last)) {}"),
        "nothing staged": ("  stage_counts(p.counts, i, counts);\n", ""),
        "one request too few": (
            "i < p.counts.batch; i += kThreads",
            "i < p.counts.batch - 1; i += kThreads",
        ),
        "the rest of the lengths is kept": ("    p.seq_lens[i] = 0;\n", ""),
        "fewer blocks than items": ("larger(tokens, p.num_seq_lens)", "p.num_seq_lens"),
        "positions beyond the last": ("    if (n < p.slots.num_positions) p.", "    p."),
        "slots beyond the last": ("  if (n < p.slots.num_slots) write", "  write"),
        "new counts read as old": (
            "corrected(p.counts, request).num_computed",
            "p.counts.num_computed_tokens[request]",
        ),
        "positions of 32 bits": ("int64_t position = 0;", "int32_t position = 0;"),
        "the last offset is not held": (
            "held.starts[thread + 1] = p.slots.query_start_loc[thread + 1];",
            "held.starts[thread] = p.slots.query_start_loc[thread];",
        ),
        "tokens before the first request": (
            "if (request >= 0 && request < batch) {",
            "if (request < batch) {",
        ),
        "tokens behind the last request": (
            "request >= 0 && request < batch) {",
            "request >= 0 && request <= batch) {",
        ),
        "requests of the first round only": (
            "for (int64_t i = thread; i < p.counts.batch; i += kThreads) "
            "settle_counts(p.counts, i);",
            "if (thread < p.counts.batch) settle_counts(p.counts, thread);",
        ),
        "fewer blocks than positions": (
            "larger(p.slots.num_slots, p.slots.num_positions);",
            "p.slots.num_slots;",
        ),
        "fewer blocks than slots": (
            "larger(p.slots.num_slots, p.slots.num_positions);",
            "p.slots.num_positions;",
        ),
        "no barrier in a grid of one block": (
            "if (!is_last_block(",
            "if (gridDim.x > 1 && !is_last_block(",
        ),
    },
)
_of(
    "correct_spec_state_",
    "launch.cuh",
    {
        "no barrier before arriving": (
            "bool* last) {\n  __syncthreads();",
            "bool* last) {",
        ),
        "no barrier after arriving": (
            "gridDim.x - 1;\n  __syncthreads();",
            "gridDim.x - 1;",
        ),
        "the first block is taken for the last": (
            "*last = arrive(arrived) == gridDim.x - 1;",
            "*last = arrive(arrived) == 0;",
        ),
        "arrives without releasing": ("__NV_ATOMIC_ACQ_REL", "__NV_ATOMIC_ACQUIRE"),
        "arrives without acquiring": ("__NV_ATOMIC_ACQ_REL", "__NV_ATOMIC_RELEASE"),
        "arrives in the block's scope": ("__NV_THREAD_SCOPE_DEVICE", "__NV_THREAD_SCOPE_BLOCK"),
        "a grid without the rest": ("(items + per_block - 1) / per_block", "items / per_block"),
    },
)

_of("ngram_propose", "lookup.cuh", LOOKUP)
_of("ngram_step_", "lookup.cuh", JOIN)
_of("ngram_step_", "launch.cuh", ARRIVING)
_of(
    "ngram_step_",
    "ngram_step.cu",
    {
        "lengths grow without being asked to": ("!p.advance || p.num", "p.num"),
        "lengths grow before all have read them": (
            "    if (thread == 0) {\n      p.next_token_ids[i]",
            "    if (thread == 0) {\n      settle(i);\n      p.next_token_ids[i]",
        ),
        "one token too many": ("if (thread < a.num_appended)", "if (thread <= a.num_appended)"),
        "one token too few": ("if (thread < a.num_appended)", "if (thread + 1 < a.num_appended)"),
        "a row grows beyond its end": (
            "appended(p.num_sampled[i], live.length, p.token_ids.capacity);",
            "p.num_sampled[i];",
        ),
        "the run is read before it is counted": (
            "? 0 : run;\n    }\n    __syncthreads();",
            "? 0 : run;\n    }",
        ),
        "rows that are none are settled": (
            "if (taken > 0) p.num_tokens",
            "if (taken >= 0) p.num_tokens",
        ),
        "what a row took counts as sampled": (
            "static_cast<int32_t>(a.num_sampled);",
            "static_cast<int32_t>(a.num_appended);",
        ),
        "discarded requests grow": (
            "block.num_sampled = discarded(p, i) ? 0 : run;",
            "block.num_sampled = run;",
        ),
        "may draft by the length before": (
            "may_draft(a.old_length + a.num_appended, p.token_ids.capacity",
            "may_draft(a.old_length, p.token_ids.capacity",
        ),
    },
)
_of(
    "ngram_step_",
    "lookup.cuh",
    {
        "tokens beyond the width": ("k < width && ", ""),
        "the first run only": ("first += kWarpSize)", "first += 2 * kWarpSize)"),
    },
)

_STEP, _APPEND, _RESET = "ngram_index_step_", "ngram_index_append_", "ngram_index_reset_"
_of(
    _STEP,
    "ngram_index.cuh",
    {
        "a hit need not be in the row": (" && same_gram(tokens, other, end, n)", ""),
        "any hit is as good": ("better(other, found, match_policy)) &&", "true) &&"),
        "the first hit counts": (
            "(found == limit || better(other, found, match_policy)) &&",
            "found == limit &&",
        ),
        "hits that begin before the row": (" && recorded >= n - 1);", ");"),
        "nothing is improved": (
            "!better(end, found, match_policy)) return true;",
            "true) return true;",
        ),
        "one bucket only": ("lane < kBucketEntries ? place.bucket[0]", "true ? place.bucket[0]"),
        "an entry that came meanwhile is overwritten": (
            "atomicCAS(const_cast<unsigned long long*>(mine), entry, make_entry(place.head, end)) "
            "== entry",
            "(*mine = make_entry(place.head, end), true)",
        ),
        "other slots' entries give way": ("is_dead(table, entry, table.generations)", "true"),
        "dead entries keep their places": ("is_dead(table, entry, table.generations)", "false"),
        "any tokens are the slot's": (
            "if (!__all_sync(kWholeWarp, agrees)) return",
            "if (false) return",
        ),
        "the newest token only is compared": ("lane < kSlotTail ||", "lane < kSlotWords - 1 ||"),
        "any length will do": ("if (indexed > known) return {SlotState::kLength, 0};", ""),
        "any options will do": (
            "if (held_options != options) return {SlotState::kOptions, 0};",
            "",
        ),
        "what is given up stays so": (
            "has_room(table, entries, given_up) ? SlotState::kRetry",
            "false ? SlotState::kRetry",
        ),
        "entries stay in use": (
            "atomicAdd(table.header + kHeaderEntries, 0u - slot[kSlotHeld]);",
            "",
        ),
        "one end too many is noted": (
            "slot[kSlotIndexed] = indexed;",
            "slot[kSlotIndexed] = indexed + 1;",
        ),
        "one end too few is noted": (
            "slot[kSlotIndexed] = indexed;",
            "slot[kSlotIndexed] = indexed - (indexed > 0);",
        ),
        "the generation stays": ("atomicAdd(table.generations + slot_id, 1u);", ""),
        "what is given up is not marked": ("slot[kSlotGivenUp] = larger(slot[kSlotHeld], 1u);", ""),
    },
)
_of(
    _STEP,
    "ngram_index_drafter.cuh",
    {
        "new ends are not looked at": (
            "if (drafts) best = look_at_ends(tokens, plan.indexed, look, shared.suffix);",
            "",
        ),
        "the block is as full as its warp": (
            "if (full) atomicAdd(&shared.full, 1u);",
            "if (full && threadIdx.x == 0) shared.full = 1;",
        ),
        "the best of the warp": (
            "if (lane_id() == 0 && best != 0) atomicMax",
            "if (threadIdx.x == 0 && best != 0) atomicMax",
        ),
        "the best of the lane": (
            "best = larger(best, __shfl_xor_sync(kWholeWarp, best, step));",
            "",
        ),
        "the entries of the warp": (
            "if (added > 0) atomicAdd(&shared.added, added);",
            "if (threadIdx.x == 0) shared.added = added;",
        ),
        "results are read before they are written": (
            "atomicMax(&shared.best, best);\n    __syncthreads();",
            "atomicMax(&shared.best, best);",
        ),
        "an end is its own answer": (
            "end + 1 < static_cast<uint32_t>(tokens.length);",
            "end < static_cast<uint32_t>(tokens.length);",
        ),
        "ends are left out": ("end += kThreads) {", "end += 2 * kThreads) {"),
        "a match may be short": ("if (len < look.min_n) continue;", ""),
        "grams from before the row": ("if (end + 1 < n) continue;", ""),
        "levels are left out": (
            "task < tasks && !full; task += kWarps",
            "task < tasks && !full; task += kWarps + 1",
        ),
        "more than a step's share": (
            "smaller(catch_up_tokens, kCatchUpTokensPerRow)",
            "catch_up_tokens",
        ),
        "more is noted than entered": (
            "note_indexed(table, mine.slot, mine.tokens, plan.upto)",
            "note_indexed(table, mine.slot, mine.tokens, length - 1)",
        ),
        "a slot nobody has": (
            "const bool has_slot = table.has(slot);",
            "const bool has_slot = true;",
        ),
        "another slot's generation": (": table.generations + slot)", ": table.generations)"),
        "full is not told": ("if (full) give_up_slot(table, mine.slot);", ""),
        "a slot that was emptied is not": ("empty_slot(table, mine.slot, plan.state);", ";"),
        "the table's longest gram is left out": (
            "n <= max_n; n += kWarps",
            "n < max_n; n += kWarps",
        ),
        "the first request says whether rows are scanned": (
            "any |= lookup.scans(i);",
            "any |= lookup.scans(0);",
        ),
        "what was scanned stays as it is kept": (
            "p.num_draft_tokens[i] &= (1 << kCountBits) - 1;",
            "",
        ),
        "what was appended is not scanned": (
            "if (p.advance || live.row < 0) return live;",
            "if (live.row >= -1) return live;",
        ),
    },
)
_of(
    _STEP,
    "ngram_index_step.cu",
    {
        "the plan is read before it is made": (
            "s.sampled_token_ids[i][thread];\n  __syncthreads();",
            "s.sampled_token_ids[i][thread];",
        ),
    },
)
_of(
    "ngram_index_propose_",
    "ngram_index_propose.cu",
    {
        "the plan is read before it is made": (
            "tokens, shared);\n  __syncthreads();",
            "tokens, shared);",
        ),
        "rows of any length": (
            "can_look_up(live.length, lookup.token_ids.capacity)",
            "live.row >= 0",
        ),
    },
)
_of(
    _APPEND,
    "ngram_index_append.cu",
    {
        "the question's own end": ("larger<int64_t>(length - 1, 0)", "length"),
        "the last end is left out": (
            "larger<int64_t>(length - 1, 0)",
            "larger<int64_t>(length - 2, 0)",
        ),
        "chunks are left out": ("chunk += gridDim.y", "chunk += gridDim.y + 1"),
        "ends are left out": ("at += kWarps", "at += kWarps + 1"),
        "grams of one token more": ("smaller(min_n - 1, end)", "smaller(min_n, end)"),
        "the longest gram is left out": ("n <= max_n && n <= end + 1", "n < max_n && n <= end + 1"),
        "grams from before the row": ("n <= max_n && n <= end + 1", "n <= max_n"),
        "full is not told": ("if (full) *given_up = kGivenUpNow;", ""),
        "entries are not counted": ("atomicAdd(slot + kSlotHeld, added);", ""),
        "nothing is noted": ("note_indexed(r.table, r.slot, r.tokens, r.ends);", ";"),
        "noted though given up": ("if (given_up == 0) note_indexed", "note_indexed"),
        "given up without entries": ("given_up == kGivenUpNow &&", "slot[kSlotHeld] != 0 &&"),
        "slots that hold others' grams": (
            "if (state > SlotState::kGivenUp) empty_slot",
            "if (false) empty_slot",
        ),
        "a slot written while others read it": (
            "  __syncwarp();  // all lanes have read",
            "  // all lanes have read",
        ),
        "rows of any length": ("length > p.token_ids.capacity || ", ""),
        "one request too many": ("if (i >= p.batch) return r;", "if (i > p.batch) return r;"),
        "finished after the next": (
            "ngram_index_finish_kernel, by_warp",
            "ngram_index_prepare_kernel, by_warp",
        ),
    },
)
_of(
    _RESET,
    "ngram_index_reset.cu",
    {
        "a slot nobody has": ("  if (!table.has(p.index.slot_indices[i])) return;\n", ""),
        "its entries stay": ("  cuda::drop_entries(table, slot_id);\n", ""),
        "its words stay": ("word < kSlotWords; ++word", "word < kSlotIndexed; ++word"),
        "the empty change their generation": (
            "if (atomicExch(slot + kSlotOptions, 0u) == 0) return;",
            "slot[kSlotOptions] = 0;",
        ),
    },
)
