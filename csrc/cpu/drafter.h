// The drafts of a batch: look up in the index or by a scan, weigh costs, ask the store, fill, write. Rows go in groups,
// so that their cache misses overlap.
#pragma once

#include "cpu/host_drafting.h"
#include "cpu/machine.h"
#include "cpu/ngram_index_arena.h"
#include "cpu/ngram_store_drafter.h"

namespace ngram_npu::cpu {

// A request's row at the time of the lookup.
struct GrownRow {
  int64_t row;  // -1: none that is usable
  int64_t length;
  int64_t known;    // a slot that has indexed more than this belongs to another request
  int64_t settled;  // tokens above this are new, and are not charged to the budget
  bool drafts;
  int32_t unused;  // for places that nothing is read for
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
class Drafter {
 public:
  explicit Drafter(const Params& params) : Drafter(params, {}, 0, {}, {}) {}
  Drafter(const Params& params, const IndexAccess& index, int64_t catch_up_tokens, const LadderOptions& ladder,
          const StoreLookup& store)
      : p_(params),
        index_(index),
        ladder_(ladder),
        options_{p_.lookup.min_n, p_.lookup.max_n, p_.lookup.match_policy, ladder.on, ladder.costs != nullptr},
        table_(index_table()),
        find_(find_occurrence()),
        readable_(static_cast<uint32_t>(smaller<int64_t>(p_.token_ids.capacity, kMaxIndexedTokens))),
        store_(store),
        scopes_(store.scopes),
        budget_(catch_up_tokens),
        usable_(open_arena(index.words, index.num_words, &arena_) &&
                (ladder.on || p_.lookup.max_n - p_.lookup.min_n < kMaxLevels)) {}

  void run() {
    if (index_.words == nullptr && !store_) {
      const int64_t tokens = tokens_to_read(p_.token_ids, p_.num_tokens, p_.row_indices, p_.batch);
      for_each_row(p_.executor, p_.batch, tokens, [&](int64_t i) { scan(i); });
      return;
    }
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

  bool looks_up(const GrownRow& r) const { return r.drafts && can_look_up(r.length, p_.token_ids.capacity); }

  const int32_t* tokens_of(const GrownRow& r) const { return r.row >= 0 ? p_.token_ids[r.row] : nullptr; }

  void scan(int64_t i) {
    const GrownRow row = kGrow(p_, i);
    draft(i, row, looks_up(row) ? Answer::kScan : Answer::kNone, nullptr, nullptr);
  }

  void group(int64_t first, int64_t size) {
    for (int64_t i = first; i < first + size; ++i) prefetch(i);
    Request requests[kQueryGroup];
    IndexQuery queries[kQueryGroup];
    int num_queries = 0;
    for (int64_t i = 0; i < size; ++i) {
      Request& r = requests[i];
      r.grown = kGrow(p_, first + i);
      r.answer = Answer::kNone;
      r.query = num_queries;
      if (!looks_up(r.grown)) continue;
      r.answer = prepare(first + i, r.grown, &queries[num_queries]) ? Answer::kIndex : Answer::kScan;
      if (r.answer == Answer::kIndex) ++num_queries;
    }
    if (num_queries > 0) table_.look_up(arena_, options_, queries, num_queries, p_.lookup.k);
    StoreQuery asked[kQueryGroup];
    if (store_) {
      for (int64_t i = 0; i < size; ++i) {
        const GrownRow& row = requests[i].grown;
        const bool asks = row.drafts && row.length >= 1 && row.length <= p_.token_ids.capacity;
        const auto scope = static_cast<uint64_t>(scope_of(scopes_, first + i));
        asked[i].row = {asks ? tokens_of(row) : nullptr, row.length, scope};
      }
      store_.look_up(asked, size);
    }
    for (int64_t i = 0; i < size; ++i) {
      const Request& r = requests[i];
      draft(first + i, r.grown, settle(r, queries), &queries[r.query], store_ ? &asked[i] : nullptr);
    }
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

  // Notes what a query has indexed. A slot without enough memory is given up, and its row is scanned.
  Answer settle(const Request& r, const IndexQuery* queries) {
    if (r.answer != Answer::kIndex) return r.answer;
    const IndexQuery& query = queries[r.query];
    if (!query.ok) give_up_slot(arena_, query.slot_id);
    note_indexed(arena_, query.slot_id, query.tokens, query.length);
    ++counts_[query.ok ? kStatIndexed : kStatScanFull];
    return query.ok ? Answer::kIndex : Answer::kScan;
  }

  // `asked` null: no store is asked.
  void draft(int64_t i, const GrownRow& row, Answer answer, const IndexQuery* query, const StoreQuery* asked) {
    const int32_t* tokens = tokens_of(row);
    Occurrence match{-1, 0};
    if (answer != Answer::kNone && draft_budget(p_.lookup.k, p_.lookup.max_len, row.length) > 0) {
      if (answer == Answer::kIndex) match = query->match;
      if (answer == Answer::kScan) match = search(tokens, row.length);
    }
    uint8_t costs[kMaxDraftTokens] = {};
    int64_t count = num_drafts(match, row.length, p_.lookup);
    if (ladder_.costs != nullptr && count > 0) {
      count = answer == Answer::kIndex
                  ? weigh(row, match, count, costs, Outcomes(arena_, query->slot_id))
                  : weigh(row, match, count, costs, [&](int64_t place) { return outcome(tokens, place); });
    } else if (p_.lookup.match_costs != nullptr) {
      const CostsByMatch by_match{p_.lookup.match_costs, match.len};
      for (int64_t j = 0; j < count; ++j) costs[j] = by_match[j];
    }
    StoreDraft better;
    if (asked != nullptr && store_.draft(*asked, p_.lookup, costs, count, &better)) {
      better.write(i, p_.lookup, row.unused, p_.draft_token_ids, p_.draft_costs);
      p_.num_draft_tokens[i] = static_cast<int32_t>(better.count);
      p_.match_len[i] = static_cast<int32_t>(better.agreed);
      return;
    }
    const int64_t readable = readable_drafts(match, row.length, count, p_.lookup);
    const DraftRows to = p_.draft_token_ids;  // a copy: for the compiler an id could be its `bytes`
    for (int64_t j = 0; j < readable; ++j) to.set(i, j, tokens[draft_source(match.end, row.length, j)]);
    for (int64_t j = readable; j < p_.lookup.k; ++j) to.set(i, j, row.unused);
    p_.draft_costs.set(i, costs, count, p_.lookup.k);
    p_.num_draft_tokens[i] = static_cast<int32_t>(count);
    p_.match_len[i] = reported_len(match, count);
  }

  // Writes the cost of each token, and returns how many of `most` stay within the limit.
  template <class Outcome>
  int64_t weigh(const GrownRow& row, Occurrence match, int64_t most, uint8_t* costs, Outcome&& outcome) const {
    const int32_t* const tokens = tokens_of(row);
    CostWalk walk({ladder_.costs, ladder_.token_logits}, tokens[row.length - 1]);
    int64_t count = 0;
    for (int64_t total = 0; count < most; ++count) {
      const int64_t line = smaller<int64_t>(match.len + count, kCostRows - 1);
      const int64_t place = draft_source(match.end, row.length, count);
      costs[count] = walk.next(line * kCostColumns + outcome(place) % kCostColumns, tokens[place]);
      total += costs[count];
      if (total > ladder_.cost_limit) break;
    }
    return count;
  }

  Occurrence search(const int32_t* tokens, int64_t length) const {
    return options_.ladder ? search_ladder(tokens, length)
                           : find_(tokens, length, p_.lookup.min_n, p_.lookup.max_n, p_.lookup.match_policy);
  }

  // The latest occurrence of the longest size that occurred, and the number of tokens that agree there.
  Occurrence search_ladder(const int32_t* tokens, int64_t length) const {
    Occurrence match = find_(tokens, length, 1, kLadderMaxN, kLatest);
    int64_t size = kLadderMaxN;
    while (size > match.len) size /= 2;
    if (size == 0 || size == match.len) return match;
    match = find_(tokens, length, size, size, kLatest);
    while (match.len <= match.end && tokens[match.end - match.len] == tokens[length - 1 - match.len]) ++match.len;
    return match;
  }

  // The outcome that an index would have kept: a row that is not completely indexed gets the same draft as one that is.
  uint8_t outcome(const int32_t* tokens, int64_t place) const {
    return place < 2 ? 0 : outcome_of(search_ladder(tokens, place), tokens, place);
  }

  const Params& p_;
  const IndexAccess index_;
  const LadderOptions ladder_;
  const IndexOptions options_;
  const IndexTable& table_;
  const FindOccurrence find_;
  const uint32_t readable_;
  const StoreDrafter store_;
  const IndexArray scopes_;
  int64_t budget_;
  Arena arena_;
  const bool usable_;
  uint32_t counts_[kHeaderEnd] = {};
};

}  // namespace
}  // namespace ngram_npu::cpu
