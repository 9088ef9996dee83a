#include "host/ngram_index_step_.h"

namespace ngram_npu::host {

NgramIndexStepParams check_ngram_index_step_(const StepArguments& given, const TensorView& index,
                                             const TensorView* slot_indices, const TensorView* workspace) {
  Arguments arguments("ngram_index_step_");
  NgramIndexStepParams p{};
  p.step = check_step(arguments, given, workspace);
  arguments.index_span(given.min_n, given.max_n);
  arguments.vector("index", index, {DType::kInt32}, -1, Arguments::kWrite);
  p.index = static_cast<int32_t*>(index.data);
  p.index_words = index.sizes[0];
  p.slot_indices = arguments.indices("slot_indices", slot_indices, p.step.batch);
  p.catch_up_tokens = kNgramIndexCatchUpTokens;
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
