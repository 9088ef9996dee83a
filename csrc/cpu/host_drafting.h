// C entry points for drafting on the host without Python. One entry point drafts and the other inserts new text into
// the index and the store, so that drafts can be returned before the text is inserted. The CPU's drafting operators use
// the same code. Neither entry point allocates memory, starts a thread, or calls other code while it holds a lock.
// StreamDrafter, which drafts in stream order, calls both (docs/design/host-drafting.md).
#pragma once

#include "core/drafting.h"
#include "core/store.h"

namespace ngram_npu {

NGRAM_FN int64_t scope_of(const IndexArray& scopes, int64_t i) { return scopes.bytes == 0 ? 0 : scopes[i]; }

// Arguments for drafting from the store. If `store.words` is null, the store is not queried.
struct StoreLookup {
  StoreAccess store;
  IndexArray scopes;  // [B]; absent: all 0
  const void* costs;  // CostTable of [kCostRows, store::kStoreCostColumns]
  int64_t cost_limit;
  const int8_t* token_logits = nullptr;  // as in CostTable
  // A second scope per request, such as one per prompt. Its draft replaces the others if more accepted tokens are
  // expected of it, as in a second call of ngram_store_step_.
  IndexArray prompt_scopes = {};              // [B]
  const uint8_t* has_prompt_scope = nullptr;  // [B], 1 or 0; null: no request has a prompt scope
};

// Parameters of ngram_npu_cpu_draft, which looks up the n-gram, truncates the draft by cost, queries the store, fills
// the remaining positions, and writes the outputs. The results equal the results of ngram_propose (if the index has no
// words) or ngram_index_propose_, followed by the drafts of ngram_store_step_. The caller ensures that no other call
// uses the store at the same time.
struct DraftParams {
  NgramIndexProposeParams index_propose;
  StoreLookup store;
};

// Rows with new tokens to insert into the store. The caller ensures that no other call uses the store at the same time.
struct StoreInsertParams {
  StoreAccess store;  // words null: nothing is stored
  TokenRows<const int32_t> token_ids;
  const int32_t* num_tokens;   // [R]
  const int32_t* num_sampled;  // [B]: number of tokens to insert from the end of each row; 0: skip the row
  IndexArray row_indices;      // [B]
  IndexArray slot_indices;     // [B]; absent: the slot has the row's number
  IndexArray scopes;           // [B]; absent: all 0
  int64_t batch;
};

// Parameters of ngram_npu_cpu_insert_tokens, which inserts rows into the index, then into the store. An index or a
// store without words is skipped.
struct InsertParams {
  NgramIndexAppendParams index;
  int64_t catch_up_tokens;  // maximum number of tokens to index; negative: no limit
  StoreInsertParams store;
};

}  // namespace ngram_npu

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_draft(const ngram_npu::DraftParams* params);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_insert_tokens(const ngram_npu::InsertParams* params);

// Drafting on the host for a model runner that has its tokens on a device. Each step is one job. The jobs run
// sequentially in stream order, in host-function callbacks that do not use Python.

namespace ngram_npu {

struct StreamOptions {
  int64_t num_rows;
  int64_t capacity;     // tokens per row
  int64_t max_sampled;  // sampled tokens per row and step
  int64_t lag;          // delay of insertions into the store, in jobs that have at least one request
  DraftParams draft;    // only lookup options, ladder, index and store are read; the drafter sets the other fields
  // In stream order, the caller writes `sampled` before a job, and the job writes `drafts`. The next job reuses both
  // buffers. sampled: [num_rows, 1 + max_sampled]; for each request of the batch, the number of tokens and then the
  // tokens. drafts: buffer for num_rows requests, with the layout StreamDraftLayout.
  const int32_t* sampled;
  uint8_t* drafts;
  // Rows for text that no request of this drafter generates, and tokens per such row. Row i uses the store's slot
  // num_rows + i.
  int64_t num_text_rows = 0, text_capacity = 0;
};

// Layout of a batch's drafts: tokens [B, k] int64, then numbers of tokens [B] and match lengths [B] int32, then costs
// [B, k] uint8 (written if the lookup computes costs).
struct StreamDraftLayout {
  int64_t counts_offset, lengths_offset, costs_offset, total_bytes;

  StreamDraftLayout(int64_t batch, int64_t k)
      : counts_offset(batch * k * 8),
        lengths_offset(counts_offset + batch * 4),
        costs_offset(lengths_offset + batch * 4),
        total_bytes(costs_offset + batch * k) {}
};

// Stop conditions that the drafter checks itself, so that all text up to the stop is stored even if the runner removes
// the request before the lag has passed.
struct StopConditions {
  const int32_t* tokens;  // stop tokens: the text ends with the first stop token, which is part of the text
  int64_t num_tokens;
  int64_t max_length;     // maximum length of the row
  int64_t prompt_length;  // the output begins after the prompt
  // The text also ends if the output has at least min_output tokens and ends with min_count copies of a pattern of
  // min_pattern to max_pattern tokens. With max_pattern 0, repetition is not checked.
  int64_t min_output, min_pattern, max_pattern, min_count;
};

// A request to add to a row.
struct StreamRequest {
  int64_t row;
  int64_t scope;
  const int32_t* tokens;
  int64_t num_tokens;
  StopConditions stop;
  // A second scope, or null. The request also drafts from the text in this scope, and its text is stored there too. The
  // store then has at least 2 * (num_rows + num_text_rows) slots, and uses the second half of them for this text.
  const int64_t* prompt_scope = nullptr;
};

// Tokens to append to a text row. If begins_text is true, they begin another text with this scope; otherwise the text
// in the row continues. Tokens beyond the capacity are dropped.
struct StreamText {
  int64_t row;
  bool begins_text;
  int64_t scope;
  const int32_t* tokens;
  int64_t num_tokens;
};

class StreamDrafter;
class StreamJob;

}  // namespace ngram_npu

// Creates a drafter and allocates all memory that a job needs. Returns null if there is not enough memory.
NGRAM_NPU_EXPORT ngram_npu::StreamDrafter* ngram_npu_cpu_stream_make(const ngram_npu::StreamOptions* options);
// Frees the drafter and returns true. If jobs are pending, returns false; the drafter and all memory that its options
// point to must then remain allocated.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_stream_free(ngram_npu::StreamDrafter* drafter);
// Add a request to a row, or remove the request of a row, in the next job. Return kOk or kOutOfMemory. Tokens are
// copied.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_add_request(ngram_npu::StreamDrafter* drafter,
                                                          const ngram_npu::StreamRequest* request);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_remove_request(ngram_npu::StreamDrafter* drafter, int64_t row);
// Appends tokens to a text row and inserts them into the store, in the next job, after its drafts. Returns kOk or
// kOutOfMemory. The tokens are copied.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_append_text(ngram_npu::StreamDrafter* drafter,
                                                          const ngram_npu::StreamText* text);
// Creates the job of one step for these rows (int32 [batch], no duplicates). Rows without a request get no drafts, and
// their tokens are ignored. If writes_drafts is false, the job writes no drafts but still inserts the text into the
// index and the store. Each job must be run exactly once, in the order of creation. Returns null if there is not enough
// memory.
NGRAM_NPU_EXPORT ngram_npu::StreamJob* ngram_npu_cpu_stream_create_job(ngram_npu::StreamDrafter* drafter,
                                                                       const int32_t* rows, int64_t batch,
                                                                       bool writes_drafts);
// Cancels the last created job, which must not have run. The next job adds and removes its requests, and
// appends its texts, instead.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_cancel_job(ngram_npu::StreamDrafter* drafter);
// Runs a job. The driver calls this function as a host-function callback, so the function does not throw, allocate
// memory or call the driver.
NGRAM_NPU_EXPORT void ngram_npu_cpu_stream_run_job(void* job);
// Returns the number of jobs that have not finished.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_stream_count_pending_jobs(const ngram_npu::StreamDrafter* drafter);
