#include "host/ngram_index_reset_.h"

namespace ngram_npu::host {

NgramIndexResetParams check_ngram_index_reset_(const TensorView& index, const TensorView& slot_indices) {
  Arguments arguments("ngram_index_reset_");
  NgramIndexResetParams p{};
  arguments.vector("index", index, {DType::kInt32}, -1, Arguments::kWrite);
  p.index = static_cast<int32_t*>(index.data);
  p.index_words = index.sizes[0];
  p.slot_indices = arguments.indices("slot_indices", &slot_indices, -1);
  p.count = slot_indices.sizes[0];
  arguments.disjoint();
  return p;
}

}  // namespace ngram_npu::host
