// All launches of an operator go to the stream that it was given.
#include <vector>

#include "core/bookkeeping.h"
#include "core/correction.h"
#include "core/drafting.h"
#include "launching.h"

using namespace ngram_npu;

namespace {

// No work, or as little as an operator accepts.
int32_t out[8];
void outputs_of(NgramProposeParams& p) {
  p.batch = 1;
  p.num_draft_tokens = out;
  p.match_len = out + 1;
}
void outputs_of(NgramStepParams& p) {
  p.batch = 1;
  p.num_draft_tokens = out;
  p.match_len = out + 1;
  p.sampled_token_ids.data = out;
  p.next_token_ids = out + 2;
  p.num_sampled = out + 3;
}
void outputs_of(PrepareInputsParams& p) { p.query_start_loc_out = out; }
void outputs_of(CorrectSpecStateParams& p) { p.slots.query_start_loc = out; }
template <class Params>
void outputs_of(Params&) {}

template <class Params>
void expect_one_stream(int32_t (*op)(const Params*, void*)) {
  Params params{};
  outputs_of(params);
  void* streams[8];
  ngram_npu_cuda_twin_streams(nullptr, 0);
  ASSERT_EQ(op(&params, &params), kOk) << ngram_npu_cuda_twin_violation();
  const int64_t count = ngram_npu_cuda_twin_streams(streams, 8);
  ASSERT_GE(count, 1);
  for (int64_t i = 0; i < count; ++i) EXPECT_EQ(streams[i], &params) << "launch " << i;
}

}  // namespace

#define NGRAM_NPU_TEST_STREAM(op, Params)                                     \
  extern "C" int32_t ngram_npu_cuda_##op(const Params* params, void* stream); \
  TEST(CudaTwinOperators, op##OnItsStream) { expect_one_stream(ngram_npu_cuda_##op); }

NGRAM_NPU_TEST_STREAM(prepare_next_token_ids, PrepareNextTokenIdsParams)
NGRAM_NPU_TEST_STREAM(prepare_inputs_padded, PrepareInputsPaddedParams)
NGRAM_NPU_TEST_STREAM(prepare_inputs, PrepareInputsParams)
NGRAM_NPU_TEST_STREAM(prepare_input_ids_, PrepareInputIdsParams)
NGRAM_NPU_TEST_STREAM(correct_num_computed_tokens_, CorrectNumComputedTokensParams)
NGRAM_NPU_TEST_STREAM(compute_slot_mapping_, ComputeSlotMappingParams)
NGRAM_NPU_TEST_STREAM(correct_spec_state_, CorrectSpecStateParams)
NGRAM_NPU_TEST_STREAM(ngram_propose, NgramProposeParams)
NGRAM_NPU_TEST_STREAM(ngram_step_, NgramStepParams)
