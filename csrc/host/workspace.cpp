#include "host/workspace.h"

#include "core/correct_spec_state_.h"
#include "core/lookup.h"

namespace ngram_npu::host {

int64_t workspace_words(std::string_view op, int64_t batch) {
  if (op == "ngram_step_" || op == "ngram_index_step_") return lookup_workspace_words(batch);
  if (op == "correct_spec_state_") return kCorrectSpecStateWorkspaceWords;
  return 0;
}

void check_workspace(const char* op, const TensorView& given, int64_t words) {
  constexpr uintptr_t kAlignment = 16;
  const Arguments arguments(op);
  if (given.sizes[0] < words) {
    arguments.fail("workspace", "size >= " + std::to_string(words) + " (for this batch)",
                   "size " + std::to_string(given.sizes[0]));
  }
  if (const uintptr_t beyond = reinterpret_cast<uintptr_t>(given.data) % kAlignment; beyond != 0) {
    arguments.fail("workspace", "memory aligned to 16 bytes",
                   "an address " + std::to_string(beyond) + " bytes behind one");
  }
}

}  // namespace ngram_npu::host
