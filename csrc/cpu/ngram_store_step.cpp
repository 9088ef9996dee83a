#include "core/ngram_store_step.h"

#include "cpu/ngram_store_drafter.h"

using namespace ngram_npu;

namespace {

constexpr int64_t kGroup = 16;  // rows whose cache misses overlap

void draft(const NgramStoreStepParams& p, const cpu::StoreDrafter& drafter) {
  const LookupOptions options{0, 0, p.draft_token_ids.capacity, p.max_len, 0, false, p.fill, nullptr, 0};
  for (int64_t first = 0; first < p.batch; first += kGroup) {
    const int64_t size = smaller(p.batch - first, kGroup);
    cpu::StoreQuery queries[kGroup];
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = first + i;
      queries[i].row =
          cpu::stored_row(p.token_ids, p.row_indices[at], p.num_tokens, p.num_sampled[at], scope_of(p.scopes, at));
    }
    drafter.look_up(queries, size);
    for (int64_t i = 0; i < size; ++i) {
      const int64_t own = larger<int64_t>(0, smaller<int64_t>(p.num_draft_tokens[first + i], options.k));
      cpu::StoreDraft draft;
      if (!drafter.draft(queries[i], options, p.draft_costs[first + i], own, &draft)) continue;
      const int32_t unused = p.fill ? queries[i].row.tokens[queries[i].row.length - 1] : kNoToken;
      draft.write(first + i, options, unused, {p.draft_token_ids.data, p.draft_token_ids.stride, sizeof(int32_t)},
                  {p.draft_costs.data, p.draft_costs.stride});
      p.num_draft_tokens[first + i] = static_cast<int32_t>(draft.count);
      p.match_len[first + i] = static_cast<int32_t>(draft.agreed);
    }
  }
}

}  // namespace

NGRAM_NPU_EXPORT int32_t ngram_npu_cpu_ngram_store_step_(const NgramStoreStepParams* params, void*) {
  const NgramStoreStepParams& p = *params;
  cpu::Store store;
  if (!cpu::open_store(p.store.words, p.store.num_words, &store)) return kOk;
  const cpu::StoreUse use(store);
  if (!use) {
    cpu::count_busy(store);
    return kOk;
  }
  const StoreLookup lookup{p.store, p.scopes, p.costs, p.cost_limit, p.token_logits};
  draft(p, cpu::StoreDrafter(lookup));
  cpu::take_in({p.store, p.token_ids, p.num_tokens, p.num_sampled, p.row_indices, p.slot_indices, p.scopes, p.batch});
  return kOk;
}
