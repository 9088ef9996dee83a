"""Single faults of the CUDA kernels, which a kernel had or might have. A fault that cannot change
what a kernel does on a GPU has no place here. Those of the lookup's join are tried on ngram_step_,
which is given a workspace: what is left in it shows."""

from __future__ import annotations

from repo.verify.mutants.mutant import parse

MUTANTS = parse("""
@ csrc/cuda/launch.cuh prepare_next_token_ids prepare_inputs_padded
one too many: if (i >= count) return; => if (i > count) return;
one too few: if (i >= count) return; => if (i >= count - 1) return;
blocks overlap: blockIdx.x} * kItemThreads => blockIdx.x} * (kItemThreads - kLanes)
one block: blocks_for(count, kItemThreads / kLanes) => dim3(1)

@ csrc/cuda/launch.cuh compute_slot_mapping_ prepare_input_ids_
one too many: if (i >= count) return; => if (i > count) return;
one too few: if (i >= count) return; => if (i >= count - 1) return;
blocks overlap: blockIdx.x} * kItemThreads => blockIdx.x} * (kItemThreads - kLanes)
one block: blocks_for(count, kItemThreads / kLanes) => dim3(1)

@ csrc/cuda/launch.cuh prepare_input_ids_
every lane writes all: thread % kLanes, kLanes); => thread % kLanes, int64_t{1});
lanes leave gaps: thread % kLanes, kLanes); => thread % kLanes, kItemThreads);
warps overlap: i = thread / kLanes; => i = thread / (2 * kLanes);

@ csrc/cuda/merging.cu merge_drafts_
one request too many: i < p.batch => i <= p.batch
one request too few: i < p.batch => i < p.batch - 1
blocks overlap: blockIdx.x} * kThreads => blockIdx.x} * (kThreads - 1)
one block: cuda::blocks_for(params->batch, cuda::kThreads) => dim3(1)
the other width: token_bytes == 8 => token_bytes == 4

@ csrc/core/bookkeeping.h prepare_input_ids_
any previous position: if (!p.draft_token_ids.has(prev)) return; =>

@ csrc/cuda/launch.cu prepare_inputs ngram_step_
a failed launch is a success: return kLaunchFailed; => return kOk;

@ csrc/cuda/launch.cuh prepare_inputs ngram_propose correct_spec_state_
nobody asks whether the launch failed
-   return status_of(cudaLaunchKernelEx(&config, kernel, arguments...));
+   cudaLaunchKernelEx(&config, kernel, arguments...);
+   return kOk;

@ csrc/cuda/launch.cuh ngram_propose
sums of warps that are not there: lane < warps ? warp_sums[lane] : Int{0} => warp_sums[lane]

@ csrc/cuda/bookkeeping.cu prepare_inputs
half of the warps, whose sums count: dim3(1), cuda::kThreads, => dim3(1), cuda::kThreads / 2,
offsets are read before they are written
- kept_before[thread + 1] = upto;
-     __syncthreads();
+ kept_before[thread + 1] = upto;
sums of 32 bits: int64_t before = 0; => int32_t before = 0;
every chunk begins at nothing: before += kept_by_all; =>
more indices than room: smaller(kept_before[r + 1], p.total_tokens) => kept_before[r + 1]
the rest begins one late: n = before + thread; => n = before + thread + 1;
one request too many: i < p.batch) { => i <= p.batch) {
indices of the wrong chunk: p.query_start_loc[first + r] => p.query_start_loc[r]
requests of the last chunk only: first += kThreads => first += kThreads + 1
lanes leave gaps: n < end; n += kWarpSize => n < end; n += kThreads

@ csrc/cuda/launch.cuh prepare_inputs
the scan takes a lane too few: if (lane >= distance) => if (lane > distance)
the scan takes a lane too many: if (lane >= distance) => if (lane >= distance - 1)
the scan stops early: distance < kWarpSize => distance < kWarpSize / 2
sums are read before they are written
- = in_warp;
-   __syncthreads();
+ = in_warp;
the last warp's sum is left out: lane < warps ? => lane < warps - 1 ?
all threads' sum is the first warp's: upto, warps - 1); => upto, 0);
a warp adds its own sum: upto, warp - 1) => upto, warp)

@ csrc/cuda/correction.cu correct_num_computed_tokens_
no barrier
- corrected(p, i));
-   __syncthreads();
+ corrected(p, i));
a warp's barrier
- corrected(p, i));
-   __syncthreads();
+ corrected(p, i));
+   __syncwarp();
nothing staged: stage_counts(p, i, corrected(p, i)); => ;
one request too few: i < p.batch; i += kThreads) settle => i < p.batch - 1; i += kThreads) settle
one request too many: i < p.batch; i += kThreads) settle => i <= p.batch; i += kThreads) settle
no second round
- i < p.batch; i += kThreads) stage
+ i < kThreads && i < p.batch; i += kThreads) stage

@ csrc/cuda/correction.cu correct_num_computed_tokens_
staged without drafts: if (counts.accepted_changes) =>
accepted before computed
- p.num_computed_tokens[i] = p.num_accepted_tokens[i];
-     p.num_accepted_tokens[i] = sampled_at(p, drafted);
+ p.num_accepted_tokens[i] = sampled_at(p, drafted);
+     p.num_computed_tokens[i] = p.num_accepted_tokens[i];
accepted without a bound: sampled_at(p, drafted) => p.num_sampled_prev[drafted]
position 0 counts as none: if (drafted < 0) => if (drafted <= 0)

@ csrc/cuda/correction.cu compute_slot_mapping_
the other width: slot_bytes == 8 => slot_bytes == 4
the next request's first token: query_start_loc[middle] > n => query_start_loc[middle] >= n
the request before: return low - 1; => return low - 2;
one offset too many: high = batch + 1; => high = batch + 2;
one offset too few: high = batch + 1; => high = batch;
writes before the first request: if (request < 0) return; =>
padding as a request: request < p.batch && =>
positions beyond the last: && n < p.num_positions =>
padding is -1: if (slot == kNoSlot) slot = p.pad_id; =>

@ csrc/cuda/correction.cu correct_spec_state_
old counts read as constant
- thread] = corrected(p.counts, thread).num_computed
+ thread] = (__ldg(p.counts.num_computed_tokens + thread), corrected(p.counts, thread).num_computed)
offsets are read before they are written
- p.slots.query_start_loc[0];
-   __syncthreads();
+ p.slots.query_start_loc[0];
a batch of one more than the block holds
- p.slots.batch <= kThreads;
+ p.slots.batch <= kThreads + 1;
the first offset is not held: if (thread == 0) held.starts[0] = p.slots.query_start_loc[0]; =>
the wrong request's count: held.num_computed[request]) => held.num_computed[0])
the counter is not zeroed
- if (gridDim.x > 1 && thread == 0) *static_cast<uint32_t*>(p.workspace) = 0;
every block settles: &held.last)) return; => &held.last)) {}
nothing staged: stage_counts(p.counts, i, counts); =>
one request too few: i < p.counts.batch; i += kThreads => i < p.counts.batch - 1; i += kThreads
the rest of the lengths is kept: p.seq_lens[i] = 0; =>
fewer blocks than items: larger(tokens, p.num_seq_lens) => p.num_seq_lens
positions beyond the last: if (n < p.slots.num_positions) p. => p.
slots beyond the last: if (n < p.slots.num_slots) write => write
new counts read as old
- corrected(p.counts, request).num_computed
+ p.counts.num_computed_tokens[request]
positions of 32 bits: int64_t position = 0; => int32_t position = 0;
the last offset is not held
- held.starts[thread + 1] = p.slots.query_start_loc[thread + 1];
+ held.starts[thread] = p.slots.query_start_loc[thread];
tokens before the first request: if (request >= 0 && request < batch) { => if (request < batch) {
tokens behind the last request
- request >= 0 && request < batch) {
+ request >= 0 && request <= batch) {
requests of the first round only
- for (int64_t i = thread; i < p.counts.batch; i += kThreads) settle_counts(p.counts, i);
+ if (thread < p.counts.batch) settle_counts(p.counts, thread);
fewer blocks than positions: larger(p.slots.num_slots, p.slots.num_positions); => p.slots.num_slots;
fewer blocks than slots: larger(p.slots.num_slots, p.slots.num_positions); => p.slots.num_positions;
no barrier in a grid of one block: if (!is_last_block( => if (gridDim.x > 1 && !is_last_block(

@ csrc/cuda/launch.cuh correct_spec_state_
no barrier before arriving
- bool* last) {
-   __syncthreads();
+ bool* last) {
no barrier after arriving
- gridDim.x - 1;
-   __syncthreads();
+ gridDim.x - 1;
the first block is taken for the last
- *last = arrive(arrived) == gridDim.x - 1;
+ *last = arrive(arrived) == 0;
arrives without releasing: __NV_ATOMIC_ACQ_REL => __NV_ATOMIC_ACQUIRE
arrives without acquiring: __NV_ATOMIC_ACQ_REL => __NV_ATOMIC_RELEASE
arrives in the block's scope: __NV_THREAD_SCOPE_DEVICE => __NV_THREAD_SCOPE_BLOCK
a grid without the rest: (items + per_block - 1) / per_block => items / per_block

@ csrc/cuda/lookup.cuh ngram_propose
the suffix is read before it is written
- - 1 - thread];
-     }
-     __syncthreads();
+ - 1 - thread];
+     }
the best is read before all reported
- search.report();
-   }
-   __syncthreads();
+ search.report();
+   }
the best begins with anything: block.best = 0; =>
where max_n was found begins with anything: block.found_in = INT32_MAX; =>
others stop in the tile itself: &block_.found_in) < tile; => &block_.found_in) <= tile;
others stop a tile early
- atomicMin(&block_.found_in, tile);
+ atomicMin(&block_.found_in, tile - 1);
others stop at a match of any length
-     }
-     return true;
-   }
-
-   // Whether the last
+       if (need > options_.min_n && lane() == 0) atomicMin(&block_.found_in, tile);
+     }
+     return true;
+   }
+
+   // Whether the last
each lane decides by itself to stop
- if (__any_sync(kWholeWarp, found_before(tile))) return false;
+ if (found_before(tile)) return false;
a suffix of one token less
- static_cast<int32_t>(options.max_n), tokens.length)
+ static_cast<int32_t>(options.max_n) - 1, tokens.length)
a warp's later chunks need not be better
- return larger(static_cast<int32_t>(options_.min_n), best_len() + 1);
+ return larger(static_cast<int32_t>(options_.min_n), best_len() + 2);
an edge has to be better
- larger(static_cast<int32_t>(options_.min_n), best_len());
+ larger(static_cast<int32_t>(options_.min_n), best_len() + 1);
the newest token matches itself
- const int32_t ends = smaller(tokens.in_row, tokens.length - 1);
+ const int32_t ends = smaller(tokens.in_row, tokens.length);
no edge behind the vectors: count = head + (block_.tokens.length - 1 - behind) => count = head
no edge before the vectors: verify(i < head ? i : => verify(i < head ? behind :
vectors from any address: tokens.length - 1), -misaligned & => tokens.length - 1), 0 &
vectors beyond the last
- static_cast<uint32_t>(num_vectors_ - 1));
+ static_cast<uint32_t>(num_vectors_));
the vector before the lane's own is the last lane's
- return lane() == 0 ? second_ : theirs;
+ return theirs;
the second token of the wrong place
- is_wanted(v.y, v.z) | is_wanted(v.z, v.w)
+ is_wanted(v.y, v.z) | is_wanted(v.y, v.w)
the second token of the wrong place, again: is_wanted(data.y, data.z) => is_wanted(data.x, data.z)
the second token counts though one is enough: need > 1 ? 0x9e3779b1u : 0; => 0x9e3779b1u;
longer than max_n
- const int32_t limit = smaller(static_cast<int32_t>(options_.max_n), end + 1);
+ const int32_t limit = end + 1;
before the row's first token: if (end + 1 < need || => if (
the latest as the earliest: (is_latest() ? chunks - 1 - chunk : chunk) => chunk
tiles are left out: tile < stop; ++tile) { => tile < stop; tile += 2) {
only the first tile
- if (!search.look(tile, now)) break;
+ if (!search.look(tile, now) || true) break;
a tile is looked at twice: now[u] = next[u]; => now[u] = now[u];
no edges: if (first == 0 && thread => if (first == 1 && thread
places of shorter matches count: static_cast<int32_t>(len_of(best_)) == longest ? => true ?
the rank of the block alone: if (block.last) block.best = shared.best; =>
no barrier after arriving
-   __syncthreads();
-   return block.last;
+   return block.last;
drafts beyond the count: j < readable_drafts( => j <= readable_drafts(
a share is one tile short: smaller(begin + each, total); => smaller(begin + each - 1, total);
shares overlap: smaller(begin + each, total); => smaller(begin + each + 1, total);
a share is used before it is known
- block.its_first_tile = total;
-   }
-   __syncthreads();
+ block.its_first_tile = total;
+   }
a tile too few for the row: (length + kTileTokens - 1) / kTileTokens)); => length / kTileTokens));
what the block shares is overwritten early
- __syncthreads();  // all are done with what the block shares
the next request is read before it is written
- block.its_first_tile = next + 1;
-     }
-     __syncthreads();
-   }
+ block.its_first_tile = next + 1;
+     }
+   }
requests of the first threads only
- smaller(first + per_thread, batch);
+ smaller(first + 1, batch);
the requests behind a multiple of the threads
- const int32_t per_thread = (batch + kLookupThreads - 1) / kLookupThreads;
+ const int32_t per_thread = larger(batch / kLookupThreads, 1);
a row that ends with a share waits for the next block
- blocks = (next - 1) / each
+ blocks = next / each
a later request begins with the share
- first = larger(static_cast<int32_t>(blockIdx.x) * each, at)
+ first = static_cast<int32_t>(blockIdx.x) * each
the walk to a share goes on behind the thread's requests: i + 1 < stop && at => at
a share goes on behind the batch: block.end && block.request < p.batch) { => block.end) {
every 32 tokens have the limit to themselves: before + sum_over_warp( => sum_over_warp(
the token that passes the limit is drafted
- is_within_limit(total, options));
+ is_within_limit(total - costs[j], options));
a block without a share looks up: if (begin >= total) block.its_first_tile = total; =>
ranks are extended by their sign
- const auto place = static_cast<uint32_t>(end);
-   return
+ const auto place = end;
+   return
an occurrence at the row's end
- end > int64_t{tokens.length} - 2 ||
+ end > int64_t{tokens.length} - 1 ||
an occurrence anywhere
- if (end > int64_t{tokens.length} - 2 || len > options.max_n) return {-1, 0};
the latest looks at a tile in the other order
- first_ + (tile * kTileVectors + u) * step;
+ first_ + (tile * kTileVectors + (is_latest() ? kTileVectors - 1 - u : u)) * step;
the latest begins a chunk late
- (is_latest() ? chunks - 1 - chunk : chunk)
+ (is_latest() ? chunks - chunk : chunk)
the latest leaves out what fills no chunk
- (num_vectors_ + kWarpSize - 1) / kWarpSize;
+ num_vectors_ / kWarpSize;
vectors before the first
- smaller(static_cast<uint32_t>(v), static_cast<uint32_t>(num_vectors_ - 1));
+ static_cast<uint32_t>(smaller(v, num_vectors_ - 1));
a last vector that is not whole
- num_vectors_ = (ends - head) / kVectorTokens;
+ num_vectors_ = (ends - head + kVectorTokens - 1) / kVectorTokens;
as many tiles as the list has: stop = smaller(stop, search.num_tiles()); =>
each lane looks again by itself
- return !__any_sync(kWholeWarp, noted) || look_again(tile);
+ return !noted || look_again(tile);
the search ends at one token less than max_n
- if (need > options_.max_n) {
+ if (need >= options_.max_n) {
the token before a vector is the last but one
- __shfl_up_sync(kWholeWarp, v.w, 1)
+ __shfl_up_sync(kWholeWarp, v.z, 1)
the edge behind begins late by the one before: behind + (i - head), need) => behind + i, need)
nothing matches at the row's very beginning: if (end + 1 < need || => if (end < need ||
a match may not take the row's first token
- smaller(static_cast<int32_t>(options_.max_n), end + 1);
+ smaller(static_cast<int32_t>(options_.max_n), end);
a match shorter than needed: if (len >= need) best_ = => best_ =
reports without an atomic
- if (lane() == 0 && longest > 0) atomicMax(&block_.best, rank);
+ if (lane() == 0 && rank > block_.best) block_.best = rank;

@ csrc/cuda/lookup.cuh ngram_step_
all share one workspace: join_blocks(shared[i], => join_blocks(shared[0],
the counter is raised before the rank is published
-     if (block.best != 0) atomicMax(&shared.best, block.best);
-     block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);
+     block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);
+     if (block.best != 0) atomicMax(&shared.best, block.best);
two ranks at once, one of which is lost
- if (block.best != 0) atomicMax(&shared.best, block.best);
+ if (block.best > *static_cast<volatile Rank*>(&shared.best)) atomicExch(&shared.best, block.best);
the workspace is left as it is: if (shared != nullptr) shared[r] = {}; =>
only the first request's workspace is zeroed
- if (shared != nullptr) shared[r] = {};
+ if (shared != nullptr && r == 0) shared[r] = {};
a block too few is waited for: - at / each + 1; => - at / each;
a block too many is waited for: - at / each + 1; => - at / each + 2;
shared rows are taken for a block's own: if (blocks == 1 || join => if (next <= block.end || join
a request's own place counts as one of its tiles: - at / each + 1; => - (at - 1) / each + 1;
every block settles: shared->left, &block.last)) return; => shared->left, &block.last)) {}
not all lengths are settled
- r < p.batch; r += kLookupThreads
+ r < p.batch; r += kLookupThreads + 1
a share belongs to the request it follows: <= begin; ++i) at += n; => < begin; ++i) at += n;
shares that leave the rest to nobody: (total + groups - 1) / groups, => total / groups,
a row that goes on in the next block is a block's own
- if (blocks == 1 || join
+ if (first == at || join
requests have no place of their own where the share begins
- block.its_first_tile = at + 1;
+ block.its_first_tile = at;
requests have no place of their own later on
- block.its_first_tile = next + 1;
+ block.its_first_tile = next;
requests have no place of their own where they are found
- at + (n = 1 + tiles_of(lookup.length(i)))
+ at + (n = tiles_of(lookup.length(i)))
on to the request behind the share: while (at < block.end && => while (at <= block.end &&
a share goes on behind the list
- block.end = smaller(begin + each, total);
+ block.end = begin + each;
the rank as it was when the block came
-     if (block.best != 0) atomicMax(&shared.best, block.best);
-     block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);
-     if (block.last) block.best = shared.best;
+     block.best = larger<Rank>(block.best, atomicMax(&shared.best, block.best));
+     block.last = arrive(&shared.arrived) + 1 == static_cast<uint32_t>(blocks);
the joined rank is read as constant
- if (block.last) block.best = shared.best;
+ if (block.last) block.best = __ldg(&shared.best);
the last of a row zeroes its workspace
-     if (block.last) block.best = shared.best;
+     if (block.last) {
+       block.best = shared.best;
+       shared = {};
+     }
one counter for two purposes: &shared->left => &shared->arrived
the block of the highest number settles
- if (!is_last_block(shared == nullptr ? nullptr : &shared->left, &block.last)) return;
+ if (blockIdx.x + 1 != gridDim.x) return;
settled only where there is a workspace
-     if (shared != nullptr) shared[r] = {};
+     if (shared == nullptr) continue;
+     shared[r] = {};
an edge of one round
- for (int32_t i = lane(); i < count; i += kWarpSize) verify(
+ if (const int32_t i = lane(); i < count) verify(
no ends among the sampled tokens
- head + (block_.tokens.length - 1 - behind);
+ head + (smaller(block_.tokens.in_row, block_.tokens.length - 1) - behind);
tokens beyond the width: k < width && =>
the first run only: first = 0;; first += kWarpSize) => first = 0;; first += 2 * kWarpSize)

@ csrc/cuda/launch.cuh ngram_step_
a plain counter
- return __nv_atomic_fetch_add(arrived, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
+ __threadfence();
+   const uint32_t before = (*static_cast<volatile uint32_t*>(arrived))++;
+   __threadfence();
+   return before;
arrives relaxed: __NV_ATOMIC_ACQ_REL => __NV_ATOMIC_RELAXED
arrives in the block's scope: __NV_THREAD_SCOPE_DEVICE => __NV_THREAD_SCOPE_BLOCK
no barrier after arriving
- gridDim.x - 1;
-   __syncthreads();
+ gridDim.x - 1;
the scan stops early: distance < kWarpSize => distance < kWarpSize / 2

@ csrc/cuda/ngram_step.cu ngram_step_
lengths grow without being asked to: !p.advance || p.num => p.num
lengths grow before all have read them
-     if (thread == 0) {
-       p.next_token_ids[i]
+     if (thread == 0) {
+       settle(i);
+       p.next_token_ids[i]
one token too many: if (thread < a.num_appended) => if (thread <= a.num_appended)
one token too few: if (thread < a.num_appended) => if (thread + 1 < a.num_appended)
a row grows beyond its end
- appended(p.num_sampled[i], live.length, p.token_ids.capacity);
+ p.num_sampled[i];
the run is read before it is counted
- ? 0 : run;
-     }
-     __syncthreads();
+ ? 0 : run;
+     }
rows that are none are settled: if (taken > 0) p.num_tokens => if (taken >= 0) p.num_tokens
what a row took counts as sampled
- static_cast<int32_t>(a.num_sampled);
+ static_cast<int32_t>(a.num_appended);
discarded requests grow: block.num_sampled = discarded(p, i) ? 0 : run; => block.num_sampled = run;
may draft by the length before
- may_draft(a.old_length + a.num_appended, p.token_ids.capacity
+ may_draft(a.old_length, p.token_ids.capacity
""")
