// Operators of the store: text that requests share, in the memory of any device.
#pragma once

#include <type_traits>

#include "api/arguments.h"
#include "core/store.h"

namespace ngram_npu::api {

NGRAM_NPU_OPERATOR(store_append_, StoreAppendParams)
NGRAM_NPU_OPERATOR(store_propose_, StoreProposeParams)

// Checks the tensors of the store that both operators use.
template <class Int, class F>
store::Contents<Int> check_contents(F& call, In<F> text, In<F> blocks, In<F> table) {
  constexpr auto kAccess = std::is_const_v<Int> ? Arguments::kRead : Arguments::kWrite;
  const TensorView text_view = call.view("text", text), blocks_view = call.view("blocks", blocks);
  const TensorView table_view = call.view("table", table);
  store::Contents<Int> contents{};
  contents.text = call.template check_token_rows<Int>(text_view, kAccess);
  const int64_t num_blocks = text_view.sizes[0], columns = table_view.sizes[1];
  call.check_shape(text_view, num_blocks, store::kBlockTokens);
  call.check_scalar("text", num_blocks, 2, store::kMaxBlocks);
  contents.blocks = call.template check_token_rows<Int>(blocks_view, kAccess);
  call.check_shape(blocks_view, num_blocks, store::kHeadWords);
  contents.table = call.template check_token_rows<Int>(table_view, kAccess);
  call.check_shape(table_view, store::kSizes, columns);
  if (columns < store::kEntryWords || (columns & (columns - 1)) != 0) {
    call.fail("table", "a width of at least 2 that is a power of two", std::to_string(columns));
  }
  return contents;
}

template <class F>
void store_append_(In<F> token_ids, In<F> num_tokens, In<F> num_sampled, Optional<F> row_indices,
                   Optional<F> slot_indices, Optional<F> scopes, In<F> slots, In<F> text, In<F> blocks, In<F> table,
                   In<F> allocator, int64_t max_new, bool hold_back, Optional<F> workspace) {
  F call("store_append_");
  StoreAppendParams p{};
  check_grown_rows(call, p, token_ids, num_tokens, num_sampled, row_indices);
  p.scopes = call.check_indices(call.view("scopes", scopes), p.batch);
  p.slot_indices = call.check_indices(call.view("slot_indices", slot_indices), p.batch);
  const TensorView slots_view = call.view("slots", slots);
  p.slots = call.template check_token_rows<int32_t>(slots_view, Arguments::kWrite);
  call.check_shape(slots_view, slots_view.sizes[0], store::kSlotWords);
  p.contents = check_contents<int32_t>(call, text, blocks, table);
  p.allocator = call.check_output_int32s(call.view("allocator", allocator), store::kAllocatorWords);
  call.check_scalar("max_new", max_new, 1, INT32_MAX);
  p.max_new = max_new;
  p.hold_back = hold_back;
  const auto workspace_view = call.view("workspace", workspace);
  if (workspace_view) call.check_output_int32s(*workspace_view, kAnySize);
  call.check_no_overlap();
  if (p.batch == 0) return;
  const auto memory = call.template workspace<store_append__op>(p, workspace_view);
  p.workspace = memory.data();
  call.template run<store_append__op>(p);
}

template <class F>
void store_propose_(In<F> token_ids, In<F> num_tokens, In<F> num_sampled, Optional<F> row_indices, Optional<F> scopes,
                    In<F> text, In<F> blocks, In<F> table, In<F> draft_token_ids, In<F> num_draft_tokens,
                    In<F> match_len, In<F> agreement, int64_t max_len, int64_t vocab_size, bool fill) {
  F call("store_propose_");
  StoreProposeParams p{};
  check_grown_rows(call, p, token_ids, num_tokens, num_sampled, row_indices);
  p.scopes = call.check_indices(call.view("scopes", scopes), p.batch);
  p.contents = check_contents<const int32_t>(call, text, blocks, table);
  const TensorView drafts = call.view("draft_token_ids", draft_token_ids);
  p.draft_token_ids = call.check_draft_rows(drafts, p.batch);
  p.k = drafts.sizes[1];
  p.num_draft_tokens = call.check_output_int32s(call.view("num_draft_tokens", num_draft_tokens), p.batch);
  p.match_len = call.check_output_int32s(call.view("match_len", match_len), p.batch);
  p.agreement = call.check_output_int32s(call.view("agreement", agreement), p.batch);
  p.max_len = max_len;
  p.vocab_size = vocab_size;
  p.fill = fill;
  call.check_no_overlap();
  if (p.batch > 0) call.template run<store_propose__op>(p);
}

}  // namespace ngram_npu::api
