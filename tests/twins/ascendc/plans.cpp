// How the AscendC kernels would be launched, as JSON, for tests: the plans are plain host functions and need no NPU.
#include "ascendc/plans.h"

#include <cstdio>
#include <string>

namespace {

using namespace ngram_npu;
using namespace ngram_npu::ascendc;

std::string json(const Shares& s) {
  return "{\"per_pass\": " + std::to_string(s.per_pass) + ", \"cores\": " + std::to_string(s.cores) + "}";
}

std::string json(const BatchTiling& t) {
  return "{\"requests\": " + json(t.requests) + ", \"tokens\": " + json(t.tokens) + "}";
}

std::string json(const LookupTiling& t) {
  return "{\"launches\": " + std::to_string(t.launches) + ", \"spans\": " + std::to_string(t.spans) +
         ", \"items\": " + json(t.items) + ", \"tile_tokens\": " + std::to_string(t.tile_tokens) +
         ", \"requests\": " + json(t.requests) + "}";
}

// null where the machine cannot carry the operator out.
template <class Tiling, class Params>
std::string described(const Params& params, const Machine& machine) {
  const LaunchPlan made = plan(params, machine);
  if (made.status != kOk) return "null";
  constexpr const char* kNames[] = {
#define NGRAM_NPU_NAME(name) #name,
      NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
  };
  Tiling tiling;
  std::memcpy(&tiling, made.args.tiling, sizeof(tiling));
  std::string launches;
  for (int32_t i = 0; i < made.num_launches; ++i) {
    launches += std::string(i > 0 ? ", " : "") + "[\"" + kNames[static_cast<size_t>(made.launches[i].kernel)] + "\", " +
                std::to_string(made.launches[i].blocks) + "]";
  }
  return "{\"launches\": [" + launches + "], \"workspace_bytes\": " + std::to_string(made.workspace_bytes) +
         ", \"tiling\": " + json(tiling) + "}";
}

// The sizes that plans depend on.
struct Sizes {
  int64_t batch, capacity, k, total_tokens, num_slots, num_positions, num_seq_lens;
};

template <class Params>
std::string lookup(const Sizes& sizes, const Machine& machine) {
  Params p{};
  p.batch = sizes.batch;
  p.token_ids.capacity = sizes.capacity;
  p.lookup.k = sizes.k;
  p.draft_token_ids = {nullptr, sizes.k, sizeof(int32_t)};
  return described<LookupTiling>(p, machine);
}

template <class Tiling, class Params>
std::string requests(const Sizes& sizes, const Machine& machine) {
  Params p{};
  p.batch = sizes.batch;
  return described<Tiling>(p, machine);
}

std::string plan_of(const std::string& op, const Sizes& sizes, const Machine& machine) {
  if (op == "ngram_propose") return lookup<NgramProposeParams>(sizes, machine);
  if (op == "ngram_step_") return lookup<NgramStepParams>(sizes, machine);
  if (op == "prepare_next_token_ids") return requests<Shares, PrepareNextTokenIdsParams>(sizes, machine);
  if (op == "prepare_inputs_padded") return requests<Shares, PrepareInputsPaddedParams>(sizes, machine);
  if (op == "prepare_input_ids_") return requests<Shares, PrepareInputIdsParams>(sizes, machine);
  if (op == "correct_num_computed_tokens_") {
    return requests<BatchTiling, CorrectNumComputedTokensParams>(sizes, machine);
  }
  if (op == "prepare_inputs") {
    PrepareInputsParams p{};
    p.batch = sizes.batch;
    p.total_tokens = sizes.total_tokens;
    return described<BatchTiling>(p, machine);
  }
  if (op == "compute_slot_mapping_") {
    ComputeSlotMappingParams p{};
    p.num_slots = sizes.num_slots;
    return described<Shares>(p, machine);
  }
  if (op == "correct_spec_state_") {
    CorrectSpecStateParams p{};
    p.counts.batch = sizes.batch;
    p.num_seq_lens = sizes.num_seq_lens;
    p.slots.num_positions = sizes.num_positions;
    p.slots.num_slots = sizes.num_slots;
    return described<BatchTiling>(p, machine);
  }
  return "";
}

}  // namespace

// Bytes of the JSON, 0 for an operator without kernels.
NGRAM_NPU_EXPORT int64_t ngram_npu_ascendc_twin_plan(const char* op, const Sizes* sizes, int64_t vector_cores,
                                                     int64_t ub_bytes, char* text, int64_t bytes) {
  const std::string made = plan_of(op, *sizes, {vector_cores, ub_bytes});
  std::snprintf(text, static_cast<size_t>(bytes), "%s", made.c_str());
  return static_cast<int64_t>(made.size());
}
