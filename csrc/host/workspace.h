#pragma once

#include <string_view>

#include "host/arguments.h"

namespace ngram_npu::host {

// Words (int32) of workspace that suffice an operator for a batch on any device; 0 where it takes none.
int64_t workspace_words(std::string_view op, int64_t batch);

// A workspace that a kernel is about to use: `words` of them, aligned to 16 bytes.
void check_workspace(const char* op, const TensorView& given, int64_t words);

}  // namespace ngram_npu::host
