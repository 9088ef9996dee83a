// How the AscendC kernels would be launched, for tests: the plans are plain host functions and need no NPU.
#include "numpy/ascendc_plans.h"

#include "ascendc/entry_points.h"
#include "numpy/front_end.h"

namespace ngram_npu::numpy {
namespace {

using namespace ascendc;

py::dict describe(const Shares& shares) {
  py::dict d;
  d["per_pass"] = shares.per_pass;
  d["cores"] = shares.cores;
  return d;
}

py::dict describe(const BatchTiling& tiling) {
  py::dict d;
  d["requests"] = describe(tiling.requests);
  d["tokens"] = describe(tiling.tokens);
  return d;
}

py::dict describe(const LookupTiling& tiling) {
  py::dict d;
  d["spans"] = tiling.spans;
  d["cores"] = tiling.cores;
  d["tile_tokens"] = tiling.tile_tokens;
  d["requests"] = describe(tiling.requests);
  return d;
}

// None where the machine cannot carry the operator out.
template <class Tiling, class Params>
py::object described_plan(const Params& params, const Machine& machine) {
  const LaunchPlan made = plan(params, machine);
  if (made.status != kOk) return py::none();
  constexpr const char* kNames[] = {
#define NGRAM_NPU_NAME(name) #name,
      NGRAM_NPU_ASCENDC_KERNELS(NGRAM_NPU_NAME)
#undef NGRAM_NPU_NAME
  };
  Tiling tiling;
  std::memcpy(&tiling, made.args.tiling, sizeof(tiling));
  py::list launches;
  for (int32_t i = 0; i < made.num_launches; ++i) {
    launches.append(py::make_tuple(kNames[static_cast<size_t>(made.launches[i].kernel)], made.launches[i].blocks));
  }
  py::dict d;
  d["launches"] = std::move(launches);
  d["workspace_bytes"] = made.workspace_bytes;
  d["tiling"] = describe(tiling);
  return d;
}

py::object ascendc_plan(const std::string& op, const py::dict& sizes, int64_t vector_cores, int64_t ub_bytes) {
  const Machine machine{vector_cores, ub_bytes};
  const auto size = [&sizes](const char* name) { return sizes[name].cast<int64_t>(); };
  if (op == "ngram_propose") {
    NgramProposeParams p{};
    p.batch = size("batch");
    p.token_ids.capacity = size("capacity");
    p.lookup.k = size("k");
    return described_plan<LookupTiling>(p, machine);
  }
  if (op == "ngram_step_") {
    NgramStepParams p{};
    p.batch = size("batch");
    p.token_ids.capacity = size("capacity");
    p.lookup.k = size("k");
    return described_plan<LookupTiling>(p, machine);
  }
  if (op == "prepare_next_token_ids") {
    PrepareNextTokenIdsParams p{};
    p.batch = size("batch");
    return described_plan<Shares>(p, machine);
  }
  if (op == "prepare_inputs_padded") {
    PrepareInputsPaddedParams p{};
    p.batch = size("batch");
    return described_plan<Shares>(p, machine);
  }
  if (op == "prepare_input_ids_") {
    PrepareInputIdsParams p{};
    p.batch = size("batch");
    return described_plan<Shares>(p, machine);
  }
  if (op == "prepare_inputs") {
    PrepareInputsParams p{};
    p.batch = size("batch");
    p.total_tokens = size("total_tokens");
    return described_plan<BatchTiling>(p, machine);
  }
  if (op == "compute_slot_mapping_") {
    ComputeSlotMappingParams p{};
    p.num_slots = size("num_slots");
    return described_plan<Shares>(p, machine);
  }
  if (op == "correct_num_computed_tokens_") {
    CorrectNumComputedTokensParams p{};
    p.batch = size("batch");
    return described_plan<BatchTiling>(p, machine);
  }
  if (op == "correct_spec_state_") {
    CorrectSpecStateParams p{};
    p.counts.batch = size("batch");
    p.num_seq_lens = size("num_seq_lens");
    p.slots.num_positions = size("num_positions");
    p.slots.num_slots = size("num_slots");
    return described_plan<BatchTiling>(p, machine);
  }
  host::Arguments("ascendc_plan").fail("op", "an operator with an AscendC kernel", "'" + op + "'");
}

}  // namespace

void define_ascendc_plans(py::module_& m) {
  m.def("ascendc_plan", ascendc_plan, py::arg("op"), py::arg("sizes"), py::arg("vector_cores"), py::arg("ub_bytes"));
}

}  // namespace ngram_npu::numpy
