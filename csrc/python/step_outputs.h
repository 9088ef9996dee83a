// What ngram_step_ and ngram_index_step_ return, as numpy arrays.
#pragma once

#include "core/ngram_step_.h"
#include "python/ops.h"

namespace ngram_npu::python {

struct StepOutputs {
  py::array_t<int32_t> next_token_ids;
  py::array_t<int32_t> num_sampled;
  py::array_t<int32_t> draft_token_ids;
  py::array_t<int32_t> num_draft_tokens;
  py::array_t<int32_t> match_len;

  explicit StepOutputs(NgramStepParams& p)
      : next_token_ids(empty(p.batch)),
        num_sampled(empty(p.batch)),
        draft_token_ids(empty(p.batch, p.lookup.k)),
        num_draft_tokens(empty(p.batch)),
        match_len(empty(p.batch)) {
    p.next_token_ids = next_token_ids.mutable_data();
    p.num_sampled = num_sampled.mutable_data();
    p.draft_token_ids = draft_token_ids.mutable_data();
    p.num_draft_tokens = num_draft_tokens.mutable_data();
    p.match_len = match_len.mutable_data();
  }

  py::tuple results() && {
    return py::make_tuple(std::move(next_token_ids), std::move(num_sampled), std::move(draft_token_ids),
                          std::move(num_draft_tokens), std::move(match_len));
  }
};

}  // namespace ngram_npu::python
