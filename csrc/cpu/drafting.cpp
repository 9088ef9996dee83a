// CPU kernels of ngram_propose and ngram_step_.
#include "core/drafting.h"

#include <cstring>

#include "cpu/machine.h"

namespace ngram_npu::cpu {
namespace {

// A request's row at the time of the lookup.
struct UpdatedRow {
  RequestRow row;
  bool should_draft;
  int32_t padding_token;  // for output positions that are not filled
};

UpdatedRow update_row(const NgramProposeParams& p, int64_t i) {
  const RequestRow row = request_row(p, i);
  return {row, row.row >= 0, padding_token(p, i)};
}

// Appends the sampled tokens to the request's row.
UpdatedRow update_row(const NgramStepParams& p, int64_t i) {
  const AcceptResult result = accept_tokens(p, i);
  const int64_t length = result.old_length + result.num_appended;
  p.next_token_ids[i] = result.next_token;
  p.num_sampled[i] = static_cast<int32_t>(result.num_sampled);
  if (result.num_appended > 0) {
    int32_t* row_end = p.token_ids[result.row] + result.old_length;
    std::memcpy(row_end, p.sampled_token_ids[i], static_cast<size_t>(result.num_appended) * sizeof(int32_t));
    if (p.advance) p.num_tokens[result.row] = static_cast<int32_t>(length);
  }
  return {{result.row, length}, should_draft(result), padding_token(p, result)};
}

template <class Params>
void draft(const Params& p, FindMatch find_match, int64_t i) {
  const auto [row, should_draft, padding_token] = update_row(p, i);
  const LookupOptions& options = p.lookup;
  const int32_t* const tokens = row.row >= 0 ? p.token_ids[row.row] : nullptr;
  Match match{-1, 0};
  if (should_draft && may_draft(row.length, p.token_ids.capacity, options))
    match = find_match(tokens, row.length, options.min_n, options.max_n, options.match_policy);
  const DraftLengths lengths = draft_lengths(tokens, match, row.length, options);
  // A local copy, because the compiler assumes that writing an id may change p.draft_token_ids.bytes.
  const DraftRows output = p.draft_token_ids;
  for (int64_t j = 0; j < lengths.num_filled; ++j)
    output.set(i, j, tokens[draft_read_position(match.end, row.length, j)]);
  for (int64_t j = lengths.num_filled; j < options.k; ++j) output.set(i, j, padding_token);
  p.num_draft_tokens[i] = static_cast<int32_t>(lengths.num_drafted);
  p.match_len[i] = reported_match_len(match, lengths.num_drafted);
}

template <class Params>
void draft_all(const Params& p) {
  const FindMatch find_match = get_find_match();
  const int64_t tokens = count_tokens_to_read(p.token_ids, p.num_tokens, p.row_indices, p.batch);
  for_each_row(p.executor, p.batch, tokens, [&](int64_t i) { draft(p, find_match, i); });
}

}  // namespace
}  // namespace ngram_npu::cpu

using namespace ngram_npu;

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const NgramProposeParams* params, void*) {
  cpu::draft_all(*params);
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const NgramStepParams* params, void*) {
  cpu::draft_all(*params);
  return kOk;
}
