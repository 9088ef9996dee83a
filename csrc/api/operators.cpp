// The checks of the operators that the table (schemas.h) cannot express, and the list of all operators.
#include "api/call.h"
#include "schemas.h"

namespace ngram_npu::api {
namespace {

// Reads an argument's declaration, such as "Tensor(a!)? workspace=None".
OperatorArgument parse_argument(const Argument& entry) {
  const std::string declaration = entry.declaration;
  const size_t space = declaration.find(' '), equals = declaration.find('=');
  const std::string type = declaration.substr(0, space);
  OperatorArgument argument{};
  argument.entry = &entry;
  argument.name = declaration.substr(space + 1, equals == std::string::npos ? equals : equals - space - 1);
  argument.kind = type.compare(0, 6, "Tensor") == 0 ? OperatorArgument::kTensor
                  : type == "bool"                  ? OperatorArgument::kBool
                                                    : OperatorArgument::kInt;
  argument.is_optional = type.back() == '?';
  argument.is_written = type.find('!') != std::string::npos;
  argument.has_default = equals != std::string::npos;
  if (argument.has_default && argument.kind != OperatorArgument::kTensor) {
    const std::string value = declaration.substr(equals + 1);
    argument.default_value = argument.kind == OperatorArgument::kInt ? std::stoll(value) : value == "True";
  }
  return argument;
}

template <class Table>
void call_operator(const Operator& op, const Value* values, FrontEnd& front_end) {
  typename Table::Params params{};
  Call call(op, values);
  call.bind_arguments(&params);
  const bool has_work = Table::complete(call, params);
  call.check_no_overlap();
  call.run(&params, has_work, front_end);
}

template <class Table>
Operator make_operator(const char* name, const char* kernel) {
  static_assert(std::is_trivially_copyable_v<typename Table::Params>);
  static_assert(std::size(Table::kArguments) <= kMaxArguments);
  Operator op{};
  op.name = name;
  op.kernel = kernel;
  op.schema = std::string(name) + "(";
  for (const Argument& entry : Table::kArguments) {
    if (&entry != Table::kArguments) op.schema += ", ";
    op.schema += entry.declaration;
    if (std::string_view(entry.declaration) != "*") op.arguments.push_back(parse_argument(entry));
  }
  op.schema += ") -> (";
  for (const Result& result : Table::kResults) {
    if (!op.results.empty()) op.schema += ", ";
    op.schema += std::string("Tensor ") + result.name;
    op.results.push_back(result);
  }
  op.schema += ')';
  op.sizes.assign(std::begin(Table::kSizes), std::end(Table::kSizes));
  op.executor = Table::kExecutor;
  op.workspace = Table::kWorkspace;
  op.workspace_words = Table::count_workspace_words;
  op.call = call_operator<Table>;
  return op;
}

}  // namespace

const std::vector<Operator>& operators() {
#define NGRAM_NPU_MAKE(op, kernel) make_operator<schemas::op>(#op, #kernel),
  static const std::vector<Operator> all{NGRAM_NPU_OPERATORS(NGRAM_NPU_MAKE)};
#undef NGRAM_NPU_MAKE
  return all;
}

int64_t workspace_words(std::string_view op, int64_t batch) {
  for (const Operator& other : operators()) {
    if (op == other.name && other.workspace_words != nullptr) return other.workspace_words(batch);
  }
  return -1;
}

}  // namespace ngram_npu::api

namespace ngram_npu::schemas {
namespace {

using api::Call;

// The columns of the store's table are found by a mask.
void check_store_table(const Call& call) {
  const int64_t columns = call.size(api::E);
  if (columns < store::kEntryWords || (columns & (columns - 1)) != 0) {
    call.fail("table", "a width of at least 2 that is a power of two", std::to_string(columns));
  }
}

void check_counts(const Call& call, CorrectNumComputedTokensParams& p) {
  p.num_previous = smaller(call.size(api::C), smaller(call.size(api::P), call.size(api::Q)));
}

// block_size * blocks_per_kv_block * cp_world and cp_world * cp_interleave must be below 2**31, so that a device can
// store these products in 32 bits.
void check_slots(const Call& call, ComputeSlotMappingParams& p) {
  const SlotLayout& layout = p.layout;
  call.check_scalar("blocks_per_kv_block", layout.blocks_per_kv_block, {1, INT32_MAX / layout.block_size});
  const int64_t kv_block = layout.block_size * layout.blocks_per_kv_block;
  call.check_scalar("cp_world", layout.cp_world, {1, INT32_MAX / kv_block});
  call.check_scalar("cp_rank", layout.cp_rank, {0, layout.cp_world - 1});
  call.check_scalar("cp_interleave", layout.cp_interleave, {1, INT32_MAX / layout.cp_world});
  if (layout.cp_world > 1 && kv_block % layout.cp_interleave != 0) {
    call.fail("cp_interleave", "a divisor of " + std::to_string(kv_block) + " (block_size * blocks_per_kv_block)",
              std::to_string(layout.cp_interleave));
  }
  p.slot_bytes = static_cast<int32_t>(call.view("slot_mapping").item_bytes);
  if (p.slot_bytes == 4) call.check_scalar("pad_id", p.pad_id, {INT32_MIN, INT32_MAX});
}

}  // namespace

template <class LookupParams>
bool LookupTable<LookupParams>::complete(const Call& call, LookupParams& p) {
  call.check_scalar("min_n", p.lookup.min_n, {1, p.lookup.max_n});
  return p.batch > 0;
}

bool store_append_::complete(const Call& call, StoreAppendParams& p) {
  check_store_table(call);
  return p.batch > 0;
}

bool store_propose_::complete(const Call& call, StoreProposeParams& p) {
  check_store_table(call);
  return p.batch > 0;
}

bool merge_drafts_::complete(const Call& call, MergeDraftsParams& p) {
  const api::TensorView& neural = call.view("neural_draft_token_ids");
  p.neural_stride = neural.strides[0];
  p.token_bytes = static_cast<int32_t>(neural.item_bytes);
  call.check_at_most("neural_draft_token_ids", "width", p.neural_width, call.size(api::k),
                     "width of ngram_draft_token_ids");
  if (!call.has("draft_costs")) {
    constexpr const char* kNoCosts = "draft_costs is None";
    call.check_absent("neural_draft_costs", kNoCosts);
    call.check_at_most("threshold", "threshold", p.threshold, 0, kNoCosts);
  }
  if (call.has("neural_acceptance")) call.check_present("num_sampled", "neural_acceptance is given");
  return p.batch > 0;
}

bool prepare_next_token_ids::complete(const Call& call, PrepareNextTokenIdsParams& p) {
  if (call.has("backup_token_ids")) {
    for (const char* other : {"token_ids", "num_tokens", "row_indices"}) {
      call.check_absent(other, "backup_token_ids is given");
    }
  } else {
    call.check_present("token_ids", "backup_token_ids is not given");
    call.check_present("num_tokens", "token_ids is given");
  }
  return p.batch > 0;
}

bool prepare_inputs::complete(const Call&, PrepareInputsParams&) { return true; }

bool prepare_input_ids_::complete(const Call&, PrepareInputIdsParams& p) { return p.batch > 0 && p.num_inputs > 0; }

bool correct_num_computed_tokens_::complete(const Call& call, CorrectNumComputedTokensParams& p) {
  check_counts(call, p);
  return p.batch > 0;
}

bool compute_slot_mapping_::complete(const Call& call, ComputeSlotMappingParams& p) {
  check_slots(call, p);
  return p.num_slots > 0;
}

bool correct_spec_state_::complete(const Call& call, CorrectSpecStateParams& p) {
  check_counts(call, p.counts);
  p.slots.positions = p.positions;
  p.slots.batch = p.counts.batch;
  check_slots(call, p.slots);
  if (call.has("discard")) {
    call.check_present("num_tokens", "discard is given");
    if (!call.has("row_indices")) {
      call.check_at_most("prev_positions", "batch", p.counts.batch, p.num_rows,
                         "size of num_tokens, because row_indices is None");
    }
  }
  return p.counts.batch > 0 || p.slots.num_slots > 0 || p.num_seq_lens > 0;
}

}  // namespace ngram_npu::schemas
