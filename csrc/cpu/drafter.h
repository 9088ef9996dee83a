// Drafts tokens for a batch: looks up n-grams in the index or by a scan, truncates drafts by cost,
// fills the remaining positions and writes the outputs. Groups of rows are processed together to overlap cache misses.
#pragma once

#include "core/drafting.h"
#include "cpu/machine.h"
#include "cpu/ngram_index_arena.h"

namespace ngram_npu::cpu {

// A request's row at the time of the lookup.
struct UpdatedRow {
  int64_t row;  // -1: no usable row
  int64_t length;
  int64_t max_indexed;  // a slot that has indexed more tokens than this number belongs to another request
  int64_t old_length;   // length without the new tokens, which do not count against the indexing budget
  bool should_draft;
  int32_t padding_token;  // for output positions that are not filled
};

namespace {

using namespace index;

// How a request is looked up.
enum class LookupMethod : uint8_t { kNone, kScan, kIndex };

struct Request {
  UpdatedRow row;
  int query;  // with kIndex, the index of the request's query in the group
  LookupMethod method;
};

// kUpdateRow(p, i) appends the sampled tokens, if any, to request i's row and returns the row.
template <class Params, UpdatedRow (*kUpdateRow)(const Params& p, int64_t i)>
class Drafter {
 public:
  explicit Drafter(const Params& params) : Drafter(params, {}, 0, {}) {}
  Drafter(const Params& params, const IndexAccess& index, int64_t catch_up_tokens, const LadderOptions& ladder)
      : p_(params),
        index_(index),
        ladder_(ladder),
        options_{p_.lookup.min_n, p_.lookup.max_n, p_.lookup.match_policy, ladder.enabled, ladder.costs != nullptr},
        operations_(index_operations()),
        find_match_(get_find_match()),
        readable_words_(static_cast<uint32_t>(smaller<int64_t>(p_.token_ids.capacity, kMaxIndexedTokens))),
        catch_up_budget_(catch_up_tokens),
        is_index_usable_(open_arena(index.words, index.num_words, &arena_) &&
                         (ladder.enabled || p_.lookup.max_n - p_.lookup.min_n < kMaxLevels)) {}

  void run() {
    if (index_.words == nullptr) {
      const int64_t tokens = count_tokens_to_read(p_.token_ids, p_.num_tokens, p_.row_indices, p_.batch);
      for_each_row(p_.executor, p_.batch, tokens, [&](int64_t i) { scan_request(i); });
      return;
    }
    for (int64_t first = 0; first < p_.batch; first += kQueryGroup)
      process_group(first, smaller<int64_t>(p_.batch - first, kQueryGroup));
    if (!is_index_usable_) return;
    for (int i = kHeaderMagic; i < kHeaderEnd; ++i) {
      if (statistics_[i] != 0) add_to_statistic(arena_, static_cast<Header>(i), statistics_[i]);
    }
  }

 private:
  int64_t slot_of(int64_t i) const { return index_.slot_of(i, p_.row_indices[i]); }

  bool has_slot(int64_t slot) const { return is_index_usable_ && slot >= 0 && slot < arena_.num_slots; }

  bool can_look_up(const UpdatedRow& row) const {
    return row.should_draft && is_lookup_possible(row.length, p_.token_ids.capacity);
  }

  const int32_t* row_tokens(const UpdatedRow& row) const { return row.row >= 0 ? p_.token_ids[row.row] : nullptr; }

  void scan_request(int64_t i) {
    const UpdatedRow row = kUpdateRow(p_, i);
    draft(i, row, can_look_up(row) ? LookupMethod::kScan : LookupMethod::kNone, nullptr);
  }

  void process_group(int64_t first, int64_t size) {
    for (int64_t i = first; i < first + size; ++i) prefetch_request(i);
    Request requests[kQueryGroup];
    IndexQuery queries[kQueryGroup];
    int num_queries = 0;
    for (int64_t i = 0; i < size; ++i) {
      Request& request = requests[i];
      request.row = kUpdateRow(p_, first + i);
      request.method = LookupMethod::kNone;
      request.query = num_queries;
      if (!can_look_up(request.row)) continue;
      request.method =
          prepare_query(first + i, request.row, &queries[num_queries]) ? LookupMethod::kIndex : LookupMethod::kScan;
      if (request.method == LookupMethod::kIndex) ++num_queries;
    }
    if (num_queries > 0) operations_.look_up(arena_, options_, queries, num_queries, p_.lookup.k);
    for (int64_t i = 0; i < size; ++i) {
      const Request& request = requests[i];
      draft(first + i, request.row, finish_query(request, queries), &queries[request.query]);
    }
  }

  // Prefetches the slot of request i and the tokens around the end of its row.
  void prefetch_request(int64_t i) const {
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

  // Prepares a query: indexes the row's tokens except for the last tokens, at most kMaxPending, which the query
  // indexes. Returns false if the row must be scanned.
  bool prepare_query(int64_t i, const UpdatedRow& row, IndexQuery* query) {
    const int64_t slot = slot_of(i);
    if (!has_slot(slot) || row.length > kMaxIndexedTokens) return count_scan(kStatScanOther);
    const int32_t* tokens = p_.token_ids[row.row];
    const uint32_t slot_id = static_cast<uint32_t>(slot);
    if (!prepare_slot(arena_, slot_id, options_, tokens, static_cast<uint32_t>(row.max_indexed)))
      return count_scan(kStatScanFull);
    const uint32_t length = static_cast<uint32_t>(row.length);
    uint32_t num_indexed = arena_.slot(slot_id)[kSlotLength];
    // If all tokens are indexed, the row's last token cannot be looked up again. With a ladder, the slot contains the
    // result of the last token's lookup.
    if (num_indexed >= length && !options_.ladder) return count_scan(kStatScanOther);
    if (length - num_indexed > kMaxPending) {
      uint32_t index_end = length - kMaxPending;
      const int64_t backlog = row.old_length - num_indexed;
      if (catch_up_budget_ >= 0 && backlog > catch_up_budget_)
        index_end = smaller(index_end, num_indexed + static_cast<uint32_t>(catch_up_budget_));
      // The budget decreases even if the arena turns out to be full. Otherwise the next row would index the same number
      // of tokens in the pages that this row's slot frees.
      if (catch_up_budget_ > 0 && backlog > 0) catch_up_budget_ -= smaller(backlog, catch_up_budget_);
      if (index_end > num_indexed &&
          !operations_.extend(arena_, options_, slot_id, tokens, readable_words_, num_indexed, index_end)) {
        disable_slot(arena_, slot_id);
        set_indexed_length(arena_, slot_id, tokens, static_cast<uint32_t>(row.max_indexed));
        return count_scan(kStatScanFull);
      }
      if (index_end > num_indexed) set_indexed_length(arena_, slot_id, tokens, index_end);
      num_indexed = index_end;
      if (length - num_indexed > kMaxPending) return count_scan(kStatScanCatchUp);
    }
    *query = {tokens, readable_words_, slot_id, num_indexed, length, {-1, 0}, false};
    return true;
  }

  // Counts a row that must be scanned, and returns false.
  bool count_scan(Header statistic) {
    ++statistics_[statistic];
    return false;
  }

  // Records what a query has indexed, and returns how the request is looked up. A slot without enough memory is
  // disabled, and its row is scanned.
  LookupMethod finish_query(const Request& request, const IndexQuery* queries) {
    if (request.method != LookupMethod::kIndex) return request.method;
    const IndexQuery& query = queries[request.query];
    if (!query.has_memory) disable_slot(arena_, query.slot_id);
    set_indexed_length(arena_, query.slot_id, query.tokens, query.length);
    ++statistics_[query.has_memory ? kStatIndexed : kStatScanFull];
    return query.has_memory ? LookupMethod::kIndex : LookupMethod::kScan;
  }

  // Writes the outputs of request i.
  void draft(int64_t i, const UpdatedRow& row, LookupMethod method, const IndexQuery* query) {
    const int32_t* tokens = row_tokens(row);
    Match match{-1, 0};
    if (method != LookupMethod::kNone && draft_budget(p_.lookup.k, p_.lookup.max_len, row.length) > 0) {
      if (method == LookupMethod::kIndex) match = query->match;
      if (method == LookupMethod::kScan) match = scan_row(tokens, row.length);
    }
    uint8_t costs[kMaxDraftTokens] = {};
    int64_t count = count_draft_tokens(match, row.length, p_.lookup);
    if (ladder_.costs != nullptr && count > 0) {
      count = method == LookupMethod::kIndex ? compute_costs(row, match, count, costs, Outcomes(arena_, query->slot_id))
                                             : compute_costs(row, match, count, costs, [&](int64_t position) {
                                                 return compute_outcome(tokens, position);
                                               });
    } else if (p_.lookup.match_costs != nullptr) {
      const CostsByMatch match_costs{p_.lookup.match_costs, match.len};
      for (int64_t j = 0; j < count; ++j) costs[j] = match_costs[j];
    }
    const int64_t num_filled = count_filled_positions(match, row.length, count, p_.lookup);
    // A local copy, because the compiler assumes that writing an id may change p_.draft_token_ids.bytes.
    const DraftRows output = p_.draft_token_ids;
    for (int64_t j = 0; j < num_filled; ++j) output.set(i, j, tokens[draft_read_position(match.end, row.length, j)]);
    for (int64_t j = num_filled; j < p_.lookup.k; ++j) output.set(i, j, row.padding_token);
    p_.draft_costs.set(i, costs, count, p_.lookup.k);
    p_.num_draft_tokens[i] = static_cast<int32_t>(count);
    p_.match_len[i] = reported_match_len(match, count);
  }

  // Writes the cost of each token and returns the number of tokens, at most `max_count`, within the cost limit.
  // get_outcome(position) returns the outcome byte of a token of the row.
  template <class GetOutcome>
  int64_t compute_costs(const UpdatedRow& row, Match match, int64_t max_count, uint8_t* costs,
                        GetOutcome&& get_outcome) const {
    const int32_t* const tokens = row_tokens(row);
    DraftCostReader cost_reader({ladder_.costs, ladder_.token_logits}, tokens[row.length - 1]);
    int64_t count = 0;
    for (int64_t total_cost = 0; count < max_count; ++count) {
      const int64_t cost_row = smaller<int64_t>(match.len + count, kCostRows - 1);
      const int64_t position = draft_read_position(match.end, row.length, count);
      costs[count] =
          cost_reader.next(cost_row * kRowCostColumns + get_outcome(position) % kRowCostColumns, tokens[position]);
      total_cost += costs[count];
      if (total_cost > ladder_.cost_limit) break;
    }
    return count;
  }

  Match scan_row(const int32_t* tokens, int64_t length) const {
    return options_.ladder ? scan_ladder(tokens, length)
                           : find_match_(tokens, length, p_.lookup.min_n, p_.lookup.max_n, p_.lookup.match_policy);
  }

  // Finds the latest occurrence of the longest ladder n-gram that has occurred before. The match may be longer.
  Match scan_ladder(const int32_t* tokens, int64_t length) const {
    Match match = find_match_(tokens, length, 1, kLadderMaxN, kLatest);
    int64_t n = kLadderMaxN;
    while (n > match.len) n /= 2;
    if (n == 0 || n == match.len) return match;
    match = find_match_(tokens, length, n, n, kLatest);
    while (match.len <= match.end && tokens[match.end - match.len] == tokens[length - 1 - match.len]) ++match.len;
    return match;
  }

  // Computes the outcome that an index would have recorded, so that drafts do not depend on how much is indexed.
  uint8_t compute_outcome(const int32_t* tokens, int64_t position) const {
    return position < 2 ? 0 : outcome_of(scan_ladder(tokens, position), tokens, position);
  }

  const Params& p_;
  const IndexAccess index_;
  const LadderOptions ladder_;
  const IndexOptions options_;
  const IndexOperations& operations_;
  const FindMatch find_match_;
  const uint32_t readable_words_;
  int64_t catch_up_budget_;
  Arena arena_;
  const bool is_index_usable_;
  uint32_t statistics_[kHeaderEnd] = {};
};

}  // namespace
}  // namespace ngram_npu::cpu
