// CPU kernels of the drafting operators, which the operator implementations (api/drafting.h) call.
#include "core/drafting.h"

#include <cstring>

#include "cpu/drafter.h"

namespace ngram_npu::cpu {
namespace {

// Returns the row for ngram_propose and its variants, which append no tokens. Its last kMaxSampledWidth tokens may be
// new.
UpdatedRow get_unmodified_row(const NgramProposeParams& p, int64_t i) {
  const RequestRow row = request_row(p, i);
  return {row.row,      row.length,         row.length, larger<int64_t>(row.length - kMaxSampledWidth, 0),
          row.row >= 0, padding_token(p, i)};
}

using ProposeDrafter = Drafter<NgramProposeParams, get_unmodified_row>;

// Appends the sampled tokens of ngram_step_ or ngram_index_step_ to the request's row, and returns the row.
UpdatedRow append_sampled_tokens(const NgramStepParams& p, int64_t i) {
  const AcceptResult result = accept_tokens(p, i);
  const int64_t length = result.old_length + result.num_appended;
  p.next_token_ids[i] = result.next_token;
  p.num_sampled[i] = static_cast<int32_t>(result.num_sampled);
  if (result.num_appended > 0) {
    int32_t* row_end = p.token_ids[result.row] + result.old_length;
    std::memcpy(row_end, p.sampled_token_ids[i], static_cast<size_t>(result.num_appended) * sizeof(int32_t));
    if (p.advance) p.num_tokens[result.row] = static_cast<int32_t>(length);
  }
  return {result.row, length, result.old_length, result.old_length, should_draft(result), padding_token(p, result)};
}

using StepDrafter = Drafter<NgramStepParams, append_sampled_tokens>;

}  // namespace
}  // namespace ngram_npu::cpu

using namespace ngram_npu;

namespace {

int64_t slot_of(const NgramIndexAppendParams& p, int64_t i) { return p.index.slot_of(i, p.row_indices[i]); }

// Whether two batch positions have the same slot, which is an error of the caller. Two threads must not use one slot,
// because one thread would free pages that the other thread writes to.
bool has_duplicate_slots(const NgramIndexAppendParams& p, const cpu::Arena& arena) {
  bool has_duplicates = false;
  for (uint32_t mark = 2; mark-- > 0;) {  // first sets the marks (1), then clears them (0)
    for (int64_t i = 0; i < p.batch; ++i) {
      const int64_t slot = slot_of(p, i);
      if (slot < 0 || slot >= arena.num_slots) continue;
      uint32_t& slot_mark = arena.slot(static_cast<uint32_t>(slot))[index::kSlotMark];
      has_duplicates |= mark != 0 && slot_mark != 0;
      slot_mark = mark;
    }
  }
  return has_duplicates;
}

// Indexes at most `budget` tokens of a row (negative: no limit). Returns the number of indexed tokens.
int64_t index_row(const NgramIndexAppendParams& p, const cpu::Arena& arena, const cpu::IndexOperations& operations,
                  int64_t i, int64_t budget) {
  const int64_t row = p.row_indices[i];
  const int64_t slot = slot_of(p, i);
  if (!p.token_ids.has(row) || slot < 0 || slot >= arena.num_slots) return 0;
  const int64_t length = p.num_tokens[row];
  if (length < 0 || length > p.token_ids.capacity || length > index::kMaxIndexedTokens) return 0;
  const cpu::IndexOptions options{p.min_n, p.max_n, p.match_policy, p.ladder, p.outcomes};
  const int32_t* tokens = p.token_ids[row];
  const uint32_t slot_id = static_cast<uint32_t>(slot);
  uint32_t index_end = static_cast<uint32_t>(length);
  if (!cpu::prepare_slot(arena, slot_id, options, tokens, index_end)) return 0;
  const uint32_t readable_words =
      static_cast<uint32_t>(smaller<int64_t>(p.token_ids.capacity, index::kMaxIndexedTokens));
  const uint32_t num_indexed = arena.slot(slot_id)[index::kSlotLength];
  if (budget >= 0) index_end = static_cast<uint32_t>(smaller<int64_t>(index_end, num_indexed + budget));
  if (num_indexed >= index_end) return 0;
  if (!operations.extend(arena, options, slot_id, tokens, readable_words, num_indexed, index_end))
    cpu::disable_slot(arena, slot_id);
  cpu::set_indexed_length(arena, slot_id, tokens, index_end);
  return index_end - num_indexed;
}

// Indexes the rows of a call, with at most `budget` tokens for all rows together (negative: no limit).
void index_rows(const NgramIndexAppendParams& p, int64_t budget) {
  cpu::Arena arena;
  if (!p.ladder && p.max_n - p.min_n >= index::kMaxLevels) return;
  if (!cpu::open_arena(p.index.words, p.index.num_words, &arena)) return;
  const cpu::IndexOperations& operations = cpu::index_operations();
  // Indexing a row takes about 15 times as long as scanning it, so multiple threads are faster even for shorter rows.
  constexpr int64_t kIndexingCostInScans = 16;
  const int64_t tokens =
      kIndexingCostInScans * cpu::count_tokens_to_read(p.token_ids, p.num_tokens, p.row_indices, p.batch);
  const bool is_single_threaded = budget >= 0 || p.executor == nullptr || has_duplicate_slots(p, arena);
  cpu::for_each_row(is_single_threaded ? nullptr : p.executor, p.batch, tokens, [&](int64_t i) {
    const int64_t num_indexed = index_row(p, arena, operations, i, budget);
    if (budget >= 0) budget -= num_indexed;
  });
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_propose(const NgramProposeParams* params, void*) {
  cpu::ProposeDrafter(*params).run();
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_step_(const NgramStepParams* params, void*) {
  cpu::StepDrafter(*params).run();
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_propose_(const NgramIndexProposeParams* params, void*) {
  const NgramIndexProposeParams& p = *params;
  cpu::ProposeDrafter(p.propose, p.index, p.catch_up_tokens, p.ladder).run();
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_step_(const NgramIndexStepParams* params, void*) {
  const NgramIndexStepParams& p = *params;
  cpu::StepDrafter(p.step, p.index, p.catch_up_tokens, p.ladder).run();
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_append_(const NgramIndexAppendParams* params, void*) {
  index_rows(*params, -1);
  return kOk;
}

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_index_reset_(const NgramIndexResetParams* params, void*) {
  cpu::Arena arena;
  if (!cpu::open_arena(params->index.words, params->index.num_words, &arena)) return kOk;
  for (int64_t i = 0; i < params->count; ++i) {
    const int64_t slot = params->index.slot_indices[i];
    if (slot >= 0 && slot < arena.num_slots) cpu::clear_slot(arena, static_cast<uint32_t>(slot));
  }
  return kOk;
}
