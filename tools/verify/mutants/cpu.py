"""Single faults that a careless maintainer might make, chosen without a look at the tests."""

from __future__ import annotations

from tools.verify.mutants.mutant import parse

MUTANTS = parse("""
@ csrc/core/common.h
unchanged: #pragma once => #pragma once
a request's tokens end beyond the tensor
- smaller<int64_t>(query_start_loc[i + 1], size)
+ query_start_loc[i + 1]

@ csrc/cpu/ngram_index_table.h
unchanged: #pragma once => #pragma once
an end larger than its page records
- if (batch->first + i + 1 > hits[level].mask)
+ if (batch->first + i > hits[level].mask)
what overflowed is not looked for
- hit) && (!overflowed || !hit->twice())) return seen.level;
+ hit)) return seen.level;
a gram at the row's start is not inserted: if (n <= hit.next) { => if (n < hit.next) {
a ladder lacks a size at a row's start
- return 32 - __builtin_clz(end + 1);
+ return 31 - __builtin_clz(end + 1);
a long match is compared before the row
- if (kLadder && a >= 15) return
+ if (kLadder && a >= 7) return
directory pages leak where the last is refused
- while (j-- > had) release_page(arena_, slot_id_, root[j]);
+ while (j-- > had + 1) release_page(arena_, slot_id_, root[j]);

@ python/ngram_npu/async_state/state.py
unchanged: from __future__ import annotations => from __future__ import annotations
a rebuilt state has a last step
- self._mirrors, self._block_tables = mirrors, tables
-             self._begun, self._last = None, None
+ self._mirrors, self._block_tables = mirrors, tables
+             self._begun = None

@ csrc/core/correction.h
a run goes on beyond its chunk: count = l.cp_interleave - in_chunk => count = l.cp_interleave
blocks of a neighbour of a sliced table
- BlockList{block_table[row], block_table.capacity}
+ BlockList{block_table[row], block_table.stride}

@ csrc/core/correction.h
previous positions below the batch: p >= c.num_previous => p >= c.batch

@ csrc/core/correction.h
a row behind the last: row >= p.num_rows || => row > p.num_rows ||

@ csrc/core/lookup_rules.h
the budget wraps
- return max_len <= num_tokens ? 0 : smaller(k, max_len - num_tokens);
+ const uint64_t left = uint64_t(max_len) - uint64_t(num_tokens);
+ return larger<int64_t>(0, smaller(k, int64_t(left)));
a scan's draft ends where it reaches the limit
- return total <= options.cost_limit;
+ return total < options.cost_limit;

@ csrc/core/merging.h
n-grams that promise no more are taken
- return promised > smaller(mean
+ return promised >= smaller(mean
the token after the drafts counts as accepted
- smaller(num_sampled - 1, drafted)
+ smaller(num_sampled, drafted)
any n-grams continue a neural draft: if (same == n) source => source
drafts that nobody verified count as rejected: drafted <= 0 || num_sampled <= 0 => num_sampled <= 0
a draft that was cut short lowers the mean
- drafted < p.neural_width ? larger(mean, next) : next
+ drafted < p.neural_width ? next : next
n-grams count as neural drafts: source == kNgramDraft ? 0 : n => n
more than 64 accepted
- smaller(smaller(num_sampled - 1, drafted), kMaxDraftTokens)
+ smaller(num_sampled - 1, drafted)

@ csrc/core/draft_costs.h
each token is judged alone: total += costs[j]; => total = costs[j];

@ csrc/core/draft_costs.h
a match of fifteen counts as fourteen
- smaller<int64_t>(candidate.len, kCostRows - 1) * 2
+ smaller<int64_t>(candidate.len, kCostRows - 2) * 2

@ csrc/core/drafting.h
a row that is full does not draft
- a.row >= 0 && a.num_sampled > 0
+ a.row >= 0 && a.num_appended > 0

@ csrc/core/bookkeeping.h
the first draft's place wraps
- int64_t{p.query_start_loc[i + 1]} - p.num_scheduled_drafts[i]
+ wrap_sub(p.query_start_loc[i + 1], p.num_scheduled_drafts[i])

@ csrc/core/bookkeeping.h
rejected tokens below zero: larger(p.num_rejected[i], 0) => p.num_rejected[i]

@ csrc/cpu/drafting.cpp
a row without room is not remembered
- cpu::give_up_slot(arena, slot_id);
+ return cpu::give_up_slot(arena, slot_id), 0;

@ csrc/cpu/ngram_index_outcomes.h
a candidate of sixteen tokens is forgotten: word & 31u => word & 15u
the last page's id is not taken over
- for (uint32_t i = 0; i < count; ++i) words[i]
+ for (uint32_t i = 0; i + 1 < count; ++i) words[i]
a page leaks where its directory is refused: release_page(arena_, slot_id_, page); =>

@ csrc/cpu/ngram_index_walk.h
a call does not know the candidate of the one before
- candidate_(outcomes_.candidate(first))
+ candidate_{-1, 0}
an append does not keep its candidate
-   walk.finish();
an outcome is told by the token before
- outcome_of(candidate_, tokens_, end)
+ outcome_of(candidate_, tokens_, end - 1)

@ csrc/cpu/drafting.cpp
a slot knows one token more than the row had
- a.old_length, a.old_length, drafts(a)
+ a.old_length + 1, a.old_length, drafts(a)

@ csrc/cpu/ngram_index_arena.cpp
a slot knows one token more than it may: length > known => length > known + 1
the newest two tokens are not compared: | (ours[3] ^ theirs[3]) =>

@ csrc/cpu/ngram_index_arena.cpp
the first directory page is not given back
- if (dir_depth > kRootDepth) {
+ if (dir_depth > kRootDepth + 1) {
directories of outcomes are not given back
- for (uint32_t i = 0; i < outcome_directories(pages); ++i)
+ for (uint32_t i = 1; i < outcome_directories(pages); ++i)
a table at its limit tries again
- const uint64_t held = arena.slot(slot_id)[kSlotGivenUp];
+ const int64_t held = static_cast<int32_t>(arena.slot(slot_id)[kSlotGivenUp]);

@ csrc/cpu/drafter.h
a draft ends where it reaches the limit
- if (total > ladder_.cost_limit) break;
+ if (total >= ladder_.cost_limit) break;
the match does not grow with the draft: found.len + count, kCost => found.len, kCost
a draft is read beyond the row
- place = draft_source(found.end, row.length, count);
+ place = found.end + 1 + count;
a row that is behind has no outcomes: return place < 2 ? 0 : => return place >= 0 ? 0 :
each row has the call's budget: budget_ -= smaller(backlog, budget_); => {}
a scan takes the longest match, which is no size
- found = find_(tokens, length, size, size, kLatest);
a row indexed to its end asks the index
- if (done >= length && !options_.ladder)
+ if (done > length && !options_.ladder)

@ csrc/cpu/stream_drafter.cpp
the store takes in without lag: grown_(static_cast<size_t>(o_.lag + 1)) => grown_(1)
what a request said up to its stop is dropped
- if (ended.cut != kNotCut && ended.cut > ended.settled) {
+ if (ended.cut == 0) {
what lags is stored at any end
- if (ended.cut != kNotCut && ended.cut > ended.settled) {
+ if (ended.cut = smaller(ended.cut, ended.length); ended.cut > ended.settled) {
text behind a stop is stored: smaller(grown.length, grown.cut) => grown.length
a row's next request takes in what the last one said: of.generation != growth.generation || =>
a prompt is written before the steps ahead of it
- events_.push_back(std::move(event));
+ leave(b.row), enter(&event);
a row ends before the steps ahead of it
- events_.push_back({row, false, 0, {}, {}});
+ leave(row);
the lag counts a row's own jobs
- if (of.generation != growth.generation || growth.length <= of.settled) continue;
+ bool mine = false;
+       for (int64_t i = 0; i < batch; ++i) mine |= rows[i] == growth.row;
+       if (!mine || of.generation != growth.generation || growth.length <= of.settled) continue;
a job is freed before it has run
- while (!jobs_.empty() && jobs_.front()->done.load(std::memory_order_acquire)) jobs_.pop_front();
+ while (jobs_.size() > 1) jobs_.pop_front();
a step that is late is skipped
- of->drafter->run(of);
+ if (of->drafter->pending() < 4) of->drafter->run(of);
repetition is looked for in the prompt: length - rule.prompt_length; => length;
a pattern is compared with itself
- end - size * rule.min_count, bytes
+ end - size * (rule.min_count - 1), bytes
a job uses a store that another call has: const cpu::StoreUse use(open); => const bool use = true;

@ csrc/cpu/ngram_store_image.cpp
a store is copied while a job writes to it
- if (!cpu::StoreUse::take(store, kCopied)) return -1;
+

@ csrc/cpu/ngram_store.h
a rank skips a store that is being copied
- if (found != store::kCopied) return false;
+ return false;

@ csrc/numpy/stream_drafter.cpp
what jobs use is freed before they ran
- if (!ngram_npu_cpu_stream_free(drafter_)) kept_.release();
+ ngram_npu_cpu_stream_free(drafter_);

@ python/ngram_npu/host_drafting.py
unchanged: from __future__ import annotations => from __future__ import annotations
a job reads before the copy
- self._stream.copy(self._sampled[:batch], sampled)
-         self._run(rows)
+ self._run(rows)
+         self._stream.copy(self._sampled[:batch], sampled)
drafts are copied before the job
- self._run(rows)
-         self._stream.copy(found, self._drafts[:end])
+ self._stream.copy(found, self._drafts[:end])
+         self._run(rows)
the next step's tokens are written before the job
- self._stream.copy(self._sampled
+ CallingThread().copy(self._sampled

@ csrc/cpu/ngram_store_drafter.h
a store's text ends with its draft: end = options.fill ? readable : count; => end = count;
a filler reads beyond the block: readable = smaller(options.k, left); => readable = options.k;

@ csrc/cpu/ngram_index_check.cpp
freed pages that no list has: if (listed != freed) return kFaultFreeList; =>

@ csrc/cpu/lookup_impl.h
vectors before the row: if (end >= need_ - 1) hits = narrow => hits = narrow
the row's end matches itself: end + block <= last_; end => end + block <= last_ + 1; end

@ csrc/cpu/ngram_store_life.cpp
clearing leaves the outcomes
- std::fill_n(store.outcomes(i), kBlockTokens, uint8_t{0});
+ static_cast<void>(i);

@ csrc/cpu/correction.cpp
padding begins before the request
- slots.fill(larger(own.begin, positioned), own.end)
+ slots.fill(positioned, own.end)

@ csrc/host/arguments.cpp
columns that reach into the next row
- offset >= width_bytes(a) && offset + width_bytes(b) <= pitch
+ offset >= width_bytes(a)
the last row is one item wide
- static_cast<uintptr_t>(last + width_bytes(v))
+ static_cast<uintptr_t>(last + v.item_bytes)

@ csrc/host/arguments.h
any device of a kind: type == other.type && index == other.index => type == other.type

@ csrc/host/correction.h
positions beyond the computed counts
- smaller(computed.sizes[0], smaller(sampled.sizes[0], drafted.sizes[0]))
+ smaller(sampled.sizes[0], drafted.sizes[0])

@ python/ngram_npu/async_state/mirrors.py
a slot given away keeps its generation: self._generation[changes.freed] += 1 =>
what follows a bad row is taken once it has left
-         if faults:
-             gained[list(faults)] = num_sampled[list(faults)] = 0
-             faults = {i: reason for i, reason in faults.items() if alive[i]}
+         faults = {i: reason for i, reason in faults.items() if alive[i]}
+         if faults:
+             gained[list(faults)] = num_sampled[list(faults)] = 0
tokens of a broken sampler are taken
- gained[list(faults)] = num_sampled[list(faults)] = 0
+ gained[list(faults)] = 0

@ python/ngram_npu/drafting.py
an index for any span: return asked or (pays and config.fits_index) => return asked or pays

@ python/ngram_npu/async_state/on_host.py
the drafter is not told who leaves
- for slot in changes.freed.tolist():
+ for slot in changes.freed.tolist()[1:]:
the store does not lag: LAG = 1 => LAG = 0
nobody is told how a request stops: stop=admission.stop => stop=None
a rebuilt state keeps the last request: in range(self._rows): => in range(self._rows - 1):

@ python/ngram_npu/async_state/truth.py
the last slot is not emptied: self.forget(rows) => self.forget(rows - 1)

@ python/ngram_npu/async_state/blocks.py
a round's rest is stored whole
- rest - self._config.cp_rank * interleave, 0, interleave
+ rest - self._config.cp_rank * interleave, 0, None

@ csrc/cpu/ngram_store_image.cpp
entries that are newer than their block's copy are loaded
- store.alive(serial) && entry.place % kBlockTokens < store.fill(serial)
+ store.alive(serial)
blocks that were given out again are loaded
- if (head[kHeadSerial] == 0 || head[kHeadSerial] + store.num_blocks >= next) continue;
+ if (head[kHeadSerial] != 1) continue;

@ csrc/core/store.h
one block too many keeps its number: (kEndOfSerials - num_blocks - 1) => (kEndOfSerials - 1)

@ csrc/cpu/ngram_store.cpp
renumbering forgets which block is before
- head[kHeadPrevious] = renumbered(head[kHeadPrevious], by);
+ head[kHeadPrevious] = 0;

@ csrc/core/draft_costs.h
negative ids have classes of their own
- 2 * (static_cast<uint32_t>(token) % kTokenClasses)
+ 2 * (token % static_cast<int32_t>(kTokenClasses))
the token before has the logit of a drafted one: logits_of(before)[1] => logits_of(before)[0]
the token before stays the row's last one: before_ = own[1]; =>
a sum of logits is cut where it should wrap
- static_cast<uint32_t>(logit - LogitCosts::kLeast) % LogitCosts::kCount
+ smaller(static_cast<uint32_t>(logit - LogitCosts::kLeast), LogitCosts::kCount - 1)
a cost above 255 wraps: cost < 255 && 1 + odds => 1 + odds
""")
