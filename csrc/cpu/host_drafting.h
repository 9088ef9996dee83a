// Drafting on the host without Python. One entry drafts, the other inserts new text, so that drafts can be returned
// before index and store are updated. The CPU's drafting operators use the same code. Neither entry allocates, starts a
// thread, or calls other code while it holds a lock. Below: the drafter of a stream, which calls both
// (docs/design/host-drafting.md).
#pragma once

#include "core/drafting.h"
#include "core/store.h"

namespace ngram_npu {

NGRAM_FN int64_t scope_of(const IndexArray& scopes, int64_t i) { return scopes.bytes == 0 ? 0 : scopes[i]; }

// The store's part of a draft. `store.words` null: no lookup in a store.
struct StoreLookup {
  StoreAccess store;
  IndexArray scopes;  // [B]; absent: all 0
  const void* costs;  // CostTable of [kCostRows, store::kStoreCostColumns]
  int64_t cost_limit;
  const int8_t* token_logits = nullptr;
};

// Looks up, applies costs, looks up in the store, fills, writes. The results equal those of ngram_propose (without
// index words) or ngram_index_propose_, followed by the drafts of ngram_store_step_ on a store that is not busy.
struct DraftParams {
  NgramIndexProposeParams lookup;
  StoreLookup store;
};

// Rows that have grown, for the store. As in DraftParams, the caller ensures that no other call uses the store
// meanwhile.
struct StoreInsertParams {
  StoreAccess store;  // words null: nothing is stored
  TokenRows<const int32_t> token_ids;
  const int32_t* num_tokens;   // [R]
  const int32_t* num_sampled;  // [B]: tokens at each row's end that are new; 0: the row is skipped
  IndexArray row_indices;      // [B]
  IndexArray slot_indices;     // [B]; absent: the slot of a row is the row
  IndexArray scopes;           // [B]; absent: all 0
  int64_t batch;
};

// Inserts rows into the index, then into the store. Either may be without words.
struct InsertParams {
  NgramIndexAppendParams index;
  int64_t catch_up_tokens;  // the most that the index inserts; negative: no limit
  StoreInsertParams store;
};

}  // namespace ngram_npu

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_draft(const ngram_npu::DraftParams* params);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_insert_tokens(const ngram_npu::InsertParams* params);

// Drafting on the host for a model runner that has its tokens on a device. A step is a job. The jobs run in order, when
// the device's stream reaches them, in a callback without Python. Design: docs/design/host-drafting.md.

namespace ngram_npu {

struct StreamOptions {
  int64_t num_rows;
  int64_t capacity;     // tokens of a row
  int64_t max_sampled;  // tokens of a row and step
  int64_t lag;          // the store inserts what was sampled this number of steps ago: jobs with a request in a row
  DraftParams draft;    // lookup options, ladder, index and store; the drafter sets the rest
  // In stream order the caller writes `sampled` before a job, which writes `drafts`. Both are reused by the next job.
  const int32_t* sampled;  // [num_rows, 1 + max_sampled]: of each request of the batch the number of tokens, the tokens
  uint8_t* drafts;         // of num_rows requests: StreamDrafts
};

// Layout of a batch's results: tokens [B, k] int64, then numbers of tokens [B] and match lengths [B] int32, then costs
// [B, k] uint8 (if the lookup gives costs).
struct StreamDrafts {
  int64_t counts, lengths, costs, end;  // offsets in bytes

  StreamDrafts(int64_t batch, int64_t k)
      : counts(batch * k * 8), lengths(counts + batch * 4), costs(lengths + batch * 4), end(costs + batch * k) {}
};

// Stop conditions that the drafter checks itself. Text up to the stop is stored even if the end is announced before the
// lag is over.
struct StreamStop {
  const int32_t* tokens;  // any of them ends the text, as its last token
  int64_t num_tokens;
  int64_t max_length;     // of the row
  int64_t prompt_length;  // the output follows it
  int64_t min_output;     // shorter output is not checked for repetition
  int64_t min_pattern;    // repetition: the output ends with the same pattern `min_count` times
  int64_t max_pattern;    // 0: repetition is not checked
  int64_t min_count;
};

struct StreamBegin {
  int64_t row;
  int64_t scope;
  const int32_t* tokens;
  int64_t num_tokens;
  StreamStop stop;
};

class StreamDrafter;
class StreamJob;

}  // namespace ngram_npu

// Reserves all memory that a job needs. Null: not enough memory.
NGRAM_NPU_EXPORT ngram_npu::StreamDrafter* ngram_npu_cpu_stream_make(const ngram_npu::StreamOptions* options);
// Frees a drafter. False: jobs are pending, so it and all memory that its options point to must stay.
NGRAM_NPU_EXPORT bool ngram_npu_cpu_stream_free(ngram_npu::StreamDrafter* drafter);
// A row begins with a text, or ends, in the next job. The tokens are copied.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_begin(ngram_npu::StreamDrafter* drafter,
                                                    const ngram_npu::StreamBegin* begin);
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_end(ngram_npu::StreamDrafter* drafter, int64_t row);
// Creates a job for a step of these rows, all different: int32 [batch]. Rows without a request get no drafts, and their
// tokens are dropped. Each job must run once, in the order of creation. Null: not enough memory.
NGRAM_NPU_EXPORT ngram_npu::StreamJob* ngram_npu_cpu_stream_step(ngram_npu::StreamDrafter* drafter, const int32_t* rows,
                                                                 int64_t batch);
// Cancels the last job, which has not run: its begins and ends move to the next job.
NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_stream_take_back(ngram_npu::StreamDrafter* drafter);
// Runs a job, as a driver's callback. Never throws, allocates nothing, calls no driver.
NGRAM_NPU_EXPORT void ngram_npu_cpu_stream_run(void* job);
// Number of jobs that have not finished.
NGRAM_NPU_EXPORT int64_t ngram_npu_cpu_stream_pending(const ngram_npu::StreamDrafter* drafter);
