// Drafts from an index, in groups of rows whose cache misses overlap; shared by ngram_index_propose_ and
// ngram_index_step_.
#pragma once

#include "core/ngram_index_access.h"
#include "core/ngram_ladder.h"
#include "cpu/lookup.h"
#include "cpu/ngram_index_outcomes.h"
#include "cpu/ngram_index_slot.h"

namespace ngram_npu::cpu {

// A request's row at the time of the lookup.
struct GrownRow {
  int64_t row;
  int64_t length;
  int64_t known;    // a slot that has indexed more than this belongs to another request
  int64_t settled;  // tokens above this are new, and are not charged to the budget
  bool drafts;
};

namespace {

using namespace index;

// How the draft of a request is found.
enum class Answer : uint8_t { kNone, kScan, kIndex };

struct Request {
  GrownRow grown;
  int query;  // number in the group, if answered from the index
  Answer answer;
};

// kGrow(p, i) appends the sampled tokens, if any, to request i's row, and returns the row.
template <class Params, GrownRow (*kGrow)(const Params& p, int64_t i)>
class IndexDrafter {
 public:
  IndexDrafter(const Params& params, const IndexAccess& index, int64_t catch_up_tokens, const LadderOptions& ladder)
      : p_(params),
        index_(index),
        ladder_(ladder),
        options_{p_.lookup.min_n, p_.lookup.max_n, p_.lookup.match_policy, ladder.on, ladder.costs != nullptr},
        table_(index_table()),
        find_(find_occurrence()),
        readable_(static_cast<uint32_t>(smaller<int64_t>(p_.token_ids.capacity, kMaxIndexedTokens))),
        budget_(catch_up_tokens),
        usable_(open_arena(index.words, index.num_words, &arena_) &&
                (ladder.on || p_.lookup.max_n - p_.lookup.min_n < kMaxLevels)) {}

  void run() {
    for (int64_t first = 0; first < p_.batch; first += kQueryGroup)
      group(first, smaller<int64_t>(p_.batch - first, kQueryGroup));
    if (!usable_) return;
    for (int i = kHeaderMagic; i < kHeaderEnd; ++i) {
      if (counts_[i] != 0) count(arena_, static_cast<Header>(i), counts_[i]);
    }
  }

 private:
  int64_t slot_of(int64_t i) const { return index_.slot_of(i, p_.row_indices[i]); }

  bool has_slot(int64_t slot) const { return usable_ && slot >= 0 && slot < arena_.num_slots; }

  void group(int64_t first, int64_t size) {
    for (int64_t i = first; i < first + size; ++i) prefetch(i);
    Request requests[kQueryGroup];
    IndexQuery queries[kQueryGroup];
    int num_queries = 0;
    for (int64_t i = 0; i < size; ++i) {
      Request& r = requests[i];
      r.grown = kGrow(p_, first + i);
      r.answer = Answer::kNone;
      if (!r.grown.drafts || !can_look_up(r.grown.length, p_.token_ids.capacity)) continue;
      r.query = num_queries;
      r.answer = prepare(first + i, r.grown, &queries[num_queries]) ? Answer::kIndex : Answer::kScan;
      if (r.answer == Answer::kIndex) ++num_queries;
    }
    if (num_queries > 0) table_.look_up(arena_, options_, queries, num_queries, p_.lookup.k);
    for (int64_t i = 0; i < size; ++i) finish(first + i, requests[i], queries);
  }

  // Fetches a row's slot, and its tokens around the end.
  void prefetch(int64_t i) const {
    const int64_t row = p_.row_indices[i];
    if (p_.token_ids.has(row)) {
      const int64_t length = p_.num_tokens[row];
      if (length > 0 && length < p_.token_ids.capacity) {
        __builtin_prefetch(p_.token_ids[row] + length - smaller<int64_t>(length, kTailTokens));
        __builtin_prefetch(p_.token_ids[row] + length);
      }
    }
    const int64_t slot = slot_of(i);
    if (has_slot(slot)) {
      const uint32_t* state = arena_.slot(static_cast<uint32_t>(slot));
      __builtin_prefetch(state);
      __builtin_prefetch(state + kSlotRoot);
      if (options_.outcomes) __builtin_prefetch(state + kSlotOutcomeRoot);
    }
  }

  // Indexes a row's tokens except for at most kMaxPending new ones. False: the row has to be scanned.
  bool prepare(int64_t i, const GrownRow& r, IndexQuery* query) {
    const int64_t slot = slot_of(i);
    if (!has_slot(slot) || r.length > kMaxIndexedTokens) return scan_for(kStatScanOther);
    const int32_t* tokens = p_.token_ids[r.row];
    const uint32_t slot_id = static_cast<uint32_t>(slot);
    if (!prepare_slot(arena_, slot_id, options_, tokens, static_cast<uint32_t>(r.known)))
      return scan_for(kStatScanFull);
    const uint32_t length = static_cast<uint32_t>(r.length);
    uint32_t done = arena_.slot(slot_id)[kSlotLength];
    // The row has not grown, so its last token is already indexed and cannot be looked up. A ladder's slot has kept the
    // result.
    if (done >= length && !options_.ladder) return scan_for(kStatScanOther);
    if (length - done > kMaxPending) {
      uint32_t upto = length - kMaxPending;
      // The few new tokens are not charged to the budget.
      const int64_t backlog = r.settled - done;
      if (budget_ >= 0 && backlog > budget_) upto = smaller(upto, done + static_cast<uint32_t>(budget_));
      // Charged even if the arena turns out to be full: otherwise the next row would try as much with the freed pages.
      if (budget_ > 0 && backlog > 0) budget_ -= smaller(backlog, budget_);
      if (upto > done && !table_.extend(arena_, options_, slot_id, tokens, readable_, done, upto)) {
        give_up_slot(arena_, slot_id);
        note_indexed(arena_, slot_id, tokens, static_cast<uint32_t>(r.known));
        return scan_for(kStatScanFull);
      }
      if (upto > done) note_indexed(arena_, slot_id, tokens, upto);
      done = upto;
      if (length - done > kMaxPending) return scan_for(kStatScanCatchUp);
    }
    *query = {tokens, readable_, slot_id, done, length, {-1, 0}, false};
    return true;
  }

  bool scan_for(Header statistic) {
    ++counts_[statistic];
    return false;
  }

  void finish(int64_t i, const Request& r, const IndexQuery* queries) {
    const GrownRow& row = r.grown;
    const int32_t* tokens = row.row >= 0 ? p_.token_ids[row.row] : nullptr;
    Occurrence found{-1, 0};
    bool scan = r.answer == Answer::kScan;
    if (r.answer == Answer::kIndex) {
      const IndexQuery& query = queries[r.query];
      if (query.ok) {
        note_indexed(arena_, query.slot_id, tokens, query.length);
        found = query.found;
        ++counts_[kStatIndexed];
      } else {
        give_up_slot(arena_, query.slot_id);
        note_indexed(arena_, query.slot_id, tokens, query.length);
        scan = true;
        ++counts_[kStatScanFull];
      }
    }
    const bool may_draft = r.answer != Answer::kNone && draft_budget(p_.lookup.k, p_.lookup.max_len, row.length) > 0;
    if (!may_draft) {
      found = {-1, 0};
    } else if (scan) {
      found = options_.ladder ? scan_ladder(tokens, row.length)
                              : find_(tokens, row.length, p_.lookup.min_n, p_.lookup.max_n, p_.lookup.match_policy);
    }
    const int32_t unused = unused_token(p_, i);
    int32_t* const draft = p_.draft_token_ids + i * p_.lookup.k;
    if (!options_.ladder) {
      write_draft(tokens, row.length, found, p_.lookup, unused, draft, p_.num_draft_tokens + i, p_.match_len + i);
      return;
    }
    uint8_t* const costs =
        ladder_.draft_costs == nullptr ? nullptr : ladder_.draft_costs + i * ladder_.draft_costs_stride;
    const auto write = [&](auto&& outcome) {
      write_ladder_draft(tokens, row.length, found, p_.lookup, ladder_, outcome, unused, draft, p_.num_draft_tokens + i,
                         p_.match_len + i, costs);
    };
    if (scan || found.len == 0) {
      write([](int64_t) { return uint8_t{0}; });
    } else {
      write(Outcomes(arena_, queries[r.query].slot_id));
    }
  }

  // The latest occurrence of the longest size that occurred, and the number of tokens that agree there.
  Occurrence scan_ladder(const int32_t* tokens, int64_t length) const {
    Occurrence found = find_(tokens, length, 1, kLadderMaxN, kLatest);
    int64_t size = kLadderMaxN;
    while (size > found.len) size /= 2;
    if (size == 0 || size == found.len) return found;
    found = find_(tokens, length, size, size, kLatest);
    while (found.len <= found.end && tokens[found.end - found.len] == tokens[length - 1 - found.len]) ++found.len;
    return found;
  }

  const Params& p_;
  const IndexAccess& index_;
  const LadderOptions& ladder_;
  const IndexOptions options_;
  const IndexTable& table_;
  const FindOccurrence find_;
  const uint32_t readable_;
  int64_t budget_;
  Arena arena_;
  const bool usable_;
  uint32_t counts_[kHeaderEnd] = {};
};

}  // namespace
}  // namespace ngram_npu::cpu
