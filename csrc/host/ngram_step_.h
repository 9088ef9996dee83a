#pragma once

#include "core/ngram_step_.h"
#include "host/arguments.h"

namespace ngram_npu::host {

// The arguments that ngram_step_ and ngram_index_step_ share.
struct StepArguments {
  TensorView token_ids;
  TensorView num_tokens;
  TensorView sampled_token_ids;
  const TensorView* discard;
  const TensorView* row_indices;
  bool advance;
  int64_t vocab_size;
  int64_t min_n;
  int64_t max_n;
  int64_t k;
  int64_t match_policy;
  bool overlap;
  int64_t max_len;
};

// Checked parameters, outputs and executor still to be filled in by the front end.
NgramStepParams check_ngram_step_(const StepArguments& given, const TensorView* workspace);

// The same for another operator's `arguments`; disjoint() is left to it.
NgramStepParams check_step(Arguments& arguments, const StepArguments& given, const TensorView* workspace);

}  // namespace ngram_npu::host
