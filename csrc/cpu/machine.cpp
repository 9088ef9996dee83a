// Implements machine.h: chooses the instruction set and the number of threads.
#include "cpu/machine.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace ngram_npu::cpu {
namespace {

struct InstructionSetEntry {
  const char* name;
  FindMatch find_match;
  bool (*is_available)();
};

#if defined(__x86_64__)
// Whether the machine has BMI, BMI2 and LZCNT. These are checked separately, because a hypervisor may hide them but not
// AVX. On a machine without LZCNT, the opcode of LZCNT runs as BSR without an error.
bool has_bit_manipulation() {
  unsigned a = 0, b = 0, features = 0, d = 0;  // clang has no feature name for LZCNT
  const bool has_lzcnt = __get_cpuid(0x80000001u, &a, &b, &features, &d) != 0 && (features & bit_LZCNT) != 0;
  return __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && has_lzcnt;
}
#endif

// The widest instruction set is last.
constexpr InstructionSetEntry kEntries[] = {
    {"scalar", find_match_scalar, [] { return true; }},
#if defined(__x86_64__)
    {"avx2", find_match_avx2, [] { return __builtin_cpu_supports("avx2") && has_bit_manipulation(); }},
    {"avx512", find_match_avx512,
     [] { return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && has_bit_manipulation(); }},
#elif defined(__aarch64__)
    {"neon", find_match_neon, [] { return true; }},
#endif
};

const InstructionSetEntry* find_widest_available_entry() {
  const InstructionSetEntry* widest_entry = kEntries;
  for (const InstructionSetEntry& entry : kEntries) {
    if (entry.is_available()) widest_entry = &entry;
  }
  return widest_entry;
}

const InstructionSetEntry* find_entry_by_name(const char* name) {
  if (std::strcmp(name, "auto") == 0) return find_widest_available_entry();
  for (const InstructionSetEntry& entry : kEntries) {
    if (std::strcmp(name, entry.name) == 0 && entry.is_available()) return &entry;
  }
  return nullptr;
}

std::atomic<int32_t> thread_limit{0};

std::atomic<const InstructionSetEntry*>& selected_entry() {
  static std::atomic<const InstructionSetEntry*> entry = [] {
    const char* requested = std::getenv("NGRAM_NPU_INSTRUCTION_SET");
    const InstructionSetEntry* entry_by_name = requested ? find_entry_by_name(requested) : nullptr;
    return entry_by_name ? entry_by_name : find_widest_available_entry();
  }();
  return entry;
}

}  // namespace

FindMatch get_find_match() { return selected_entry().load(std::memory_order_relaxed)->find_match; }

int32_t choose_num_threads(const Executor* executor, int64_t batch, int64_t tokens) {
  if (executor == nullptr) return 1;
  int64_t num_threads = executor->max_threads;
  if (const int32_t limit = ngram_npu_cpu_num_threads(); limit > 0) num_threads = smaller<int64_t>(num_threads, limit);
  return static_cast<int32_t>(smaller(smaller(num_threads, batch), tokens / executor->min_tokens_per_thread));
}

}  // namespace ngram_npu::cpu

const char* ngram_npu_cpu_instruction_set() {
  return ngram_npu::cpu::selected_entry().load(std::memory_order_relaxed)->name;
}

int32_t ngram_npu_cpu_set_instruction_set(const char* name) {
  const ngram_npu::cpu::InstructionSetEntry* entry = name ? ngram_npu::cpu::find_entry_by_name(name) : nullptr;
  if (!entry) return ngram_npu::kInvalidParams;
  ngram_npu::cpu::selected_entry().store(entry, std::memory_order_relaxed);
  return ngram_npu::kOk;
}

void ngram_npu_cpu_set_num_threads(int32_t limit) { ngram_npu::cpu::thread_limit.store(limit < 0 ? 0 : limit); }

int32_t ngram_npu_cpu_num_threads() { return ngram_npu::cpu::thread_limit.load(); }
