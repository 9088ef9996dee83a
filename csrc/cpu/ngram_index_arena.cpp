// Implements ngram_index_arena.h and the functions of ngram_index.h that size and create an index.
#include "cpu/ngram_index_arena.h"

#include <pthread.h>

#include <atomic>
#include <cstring>

#include "core/draft_costs.h"
#include "cpu/machine.h"
#include "cpu/ngram_index.h"

namespace ngram_npu::cpu {

using namespace index;

namespace {

// A word of `page_owners` is slot + 1 for a page in use, kFree | (next + 1) for a freed page, and 0 for an unused page.
constexpr uint32_t kFree = 0x80000000u;

// A spin lock for the pages of all indices. A page is allocated once in a few hundred insertions, so one lock per
// process is enough. The lock is not in the tensor, so that corrupt contents cannot block a caller.
class PageLock {
 public:
  PageLock() {
    while (locked_.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~PageLock() { locked_.clear(std::memory_order_release); }
  PageLock(const PageLock&) = delete;
  PageLock& operator=(const PageLock&) = delete;

  // A thread that held the lock during a fork does not exist in the child, so it cannot unlock there.
  static void unlock_in_child() { locked_.clear(); }

 private:
  static std::atomic_flag locked_;
};
std::atomic_flag PageLock::locked_ = ATOMIC_FLAG_INIT;
[[maybe_unused]] const int fork_handler = pthread_atfork(nullptr, nullptr, PageLock::unlock_in_child);

// Returns the new number of pages in use. Atomic, because can_enable_again() reads it without the lock.
uint32_t add_pages_in_use(const Arena& arena, uint32_t difference) {
  return __atomic_add_fetch(arena.header + kHeaderPagesInUse, difference, __ATOMIC_RELAXED);
}

// The caller holds the lock.
void free_page(const Arena& arena, uint32_t slot_id, uint32_t page) {
  // A corrupt directory must not free a page twice, or a page of another slot.
  if (page >= arena.num_pages || arena.page_owners[page] != slot_id + 1) return;
  arena.page_owners[page] = kFree | arena.header[kHeaderFreePage];
  arena.header[kHeaderFreePage] = page + 1;
  add_pages_in_use(arena, ~0u);
}

int64_t words_before_pages(int64_t num_slots, int64_t num_pages) {
  const int64_t words = kHeaderWords + num_slots * kSlotWords + num_pages;
  return (words + kPageWords - 1) / kPageWords * kPageWords;
}

}  // namespace

bool open_arena(int32_t* index, int64_t words, Arena* arena) {
  if (index == nullptr || words < kHeaderWords) return false;
  uint32_t* base = reinterpret_cast<uint32_t*>(index);
  const int64_t num_slots = base[kHeaderSlots];
  const int64_t num_pages = base[kHeaderPages];
  const int64_t needed_words = ngram_npu_cpu_ngram_index_words(num_slots, num_pages);
  if (base[kHeaderMagic] != kMagic || needed_words == 0 || needed_words > words) return false;
  arena->header = base;
  arena->slots = base + kHeaderWords;
  arena->page_owners = arena->slots + num_slots * kSlotWords;
  arena->pages = base + words_before_pages(num_slots, num_pages);
  arena->num_slots = static_cast<uint32_t>(num_slots);
  arena->num_pages = static_cast<uint32_t>(num_pages);
  return true;
}

uint32_t allocate_page(const Arena& arena, uint32_t slot_id) {
  const PageLock lock;
  uint32_t* header = arena.header;
  uint32_t page = header[kHeaderFreePage] - 1;
  if (page < arena.num_pages && (arena.page_owners[page] & kFree) != 0) {
    header[kHeaderFreePage] = arena.page_owners[page] & ~kFree;
  } else {
    page = header[kHeaderUnusedPage];
    if (page >= arena.num_pages) return kNoPage;
    header[kHeaderUnusedPage] = page + 1;
  }
  arena.page_owners[page] = slot_id + 1;
  const uint32_t in_use = add_pages_in_use(arena, 1);
  if (in_use > header[kHeaderPagesPeak]) header[kHeaderPagesPeak] = in_use;
  return page;
}

void release_page(const Arena& arena, uint32_t slot_id, uint32_t page) {
  const PageLock lock;
  free_page(arena, slot_id, page);
}

void clear_slot(const Arena& arena, uint32_t slot_id) {
  uint32_t* slot = arena.slot(slot_id);
  if (slot[kSlotPages] > 0) {
    const PageLock lock;
    const uint32_t dir_depth = smaller(slot[kSlotDepth], kMaxDepth);
    const uint32_t size = 1u << dir_depth;
    for (uint32_t i = 0; i < size;) {
      const uint32_t entry = dir_depth <= kRootDepth
                                 ? slot[kSlotRoot + i]
                                 : arena.page(slot[kSlotRoot + (i >> kPageEntriesLog2)])[i % kPageWords];
      free_page(arena, slot_id, entry >> 4);
      i += 1u << (dir_depth - smaller(entry & 15u, dir_depth));  // the number of directory entries of the page
    }
    if (dir_depth > kRootDepth) {
      for (uint32_t i = 0; i < size; i += 1u << kPageEntriesLog2) {
        free_page(arena, slot_id, slot[kSlotRoot + (i >> kPageEntriesLog2)]);
      }
    }
  }
  if (slot[kSlotOutcomePages] > 0) {
    const PageLock lock;
    const uint32_t pages = smaller(slot[kSlotOutcomePages], kMaxOutcomePages);
    for (uint32_t i = 0; i < pages; ++i) free_page(arena, slot_id, *outcome_page_id(arena, slot, pages, i));
    for (uint32_t i = 0; i < count_outcome_directories(pages); ++i)
      free_page(arena, slot_id, slot[kSlotOutcomeRoot + i]);
  }
  for (int64_t i = 0; i < kSlotWords; ++i) slot[i] = 0;
}

void disable_slot(const Arena& arena, uint32_t slot_id) {
  uint32_t* slot = arena.slot(slot_id);
  const uint32_t options = slot[kSlotOptions];
  const uint32_t needed_pages = larger(larger(slot[kSlotPages], slot[kSlotDisabled]), 1u);
  clear_slot(arena, slot_id);
  slot[kSlotOptions] = options;
  slot[kSlotDisabled] = needed_pages;
  add_to_statistic(arena, kStatDisabled);
}

bool can_enable_again(const Arena& arena, uint32_t slot_id) {
  const uint64_t old_pages = arena.slot(slot_id)[kSlotDisabled];
  const uint64_t in_use = __atomic_load_n(arena.header + kHeaderPagesInUse, __ATOMIC_RELAXED);
  return in_use + old_pages + old_pages / 4 + 2 < arena.num_pages;
}

void add_to_statistic(const Arena& arena, Header statistic, uint32_t amount) {
  __atomic_fetch_add(arena.header + statistic, amount, __ATOMIC_RELAXED);
}

const IndexOperations& index_operations() {
  switch (instruction_set()) {
#if defined(__x86_64__)
    case InstructionSet::kAvx512: return kIndexOperationsAvx512;
    case InstructionSet::kAvx2: return kIndexOperationsAvx2;
#elif defined(__aarch64__)
    case InstructionSet::kNeon: return kIndexOperationsNeon;
#endif
    default: return kIndexOperationsScalar;
  }
}

namespace {

// Whether the last indexed tokens still equal the row's tokens at these positions.
bool is_tail_equal(const uint32_t* slot, const int32_t* tokens, uint32_t length) {
  const uint32_t* tail = slot + kSlotTail;
  if (length >= kTailTokens) {
    uint64_t indexed[kTailTokens / 2], current[kTailTokens / 2];
    std::memcpy(indexed, tail, sizeof indexed);
    std::memcpy(current, tokens + length - kTailTokens, sizeof current);
    return ((indexed[0] ^ current[0]) | (indexed[1] ^ current[1]) | (indexed[2] ^ current[2]) |
            (indexed[3] ^ current[3])) == 0;
  }
  return std::memcmp(tail + kTailTokens - length, tokens, length * sizeof *tail) == 0;
}

}  // namespace

bool prepare_slot(const Arena& arena, uint32_t slot_id, const IndexOptions& options, const int32_t* tokens,
                  uint32_t max_indexed) {
  uint32_t* slot = arena.slot(slot_id);
  const uint32_t packed_options =
      pack_options(options.min_n, options.max_n, options.match_policy, options.ladder, options.outcomes);
  const uint32_t length = slot[kSlotLength];
  if (slot[kSlotOptions] != packed_options) {
    if (slot[kSlotOptions] != 0) add_to_statistic(arena, kStatRebuildOptions);
    clear_slot(arena, slot_id);
  } else if (length > max_indexed) {
    add_to_statistic(arena, kStatRebuildLength);
    clear_slot(arena, slot_id);
  } else if (!is_tail_equal(slot, tokens, length)) {
    add_to_statistic(arena, kStatRebuildTokens);
    clear_slot(arena, slot_id);
  } else if (slot[kSlotDisabled] != 0) {
    if (!can_enable_again(arena, slot_id)) return false;
    clear_slot(arena, slot_id);
  }
  slot[kSlotOptions] = packed_options;
  return true;
}

void set_indexed_length(const Arena& arena, uint32_t slot_id, const int32_t* tokens, uint32_t length) {
  uint32_t* slot = arena.slot(slot_id);
  slot[kSlotLength] = length;
  if (length >= kTailTokens) {
    std::memcpy(slot + kSlotTail, tokens + length - kTailTokens, kTailTokens * sizeof *slot);
  } else {
    for (uint32_t i = 0; i < length; ++i) slot[kSlotTail + kTailTokens - length + i] = static_cast<uint32_t>(tokens[i]);
  }
}

}  // namespace ngram_npu::cpu

using namespace ngram_npu;

int64_t ngram_npu_cpu_ngram_index_words(int64_t num_slots, int64_t num_pages) {
  if (num_slots < 1 || num_pages < 1 || num_slots > index::kMaxSlots || num_pages > index::kMaxPages) return 0;
  return cpu::words_before_pages(num_slots, num_pages) + num_pages * index::kPageWords;
}

int64_t ngram_npu_cpu_ngram_index_pages(int64_t tokens, int64_t num_slots, int64_t min_n, int64_t max_n, bool any_data,
                                        bool ladder, bool outcomes) {
  if (tokens < 0 || num_slots < 1 || num_slots > index::kMaxSlots) return 0;
  if (!ladder && (min_n < 1 || max_n < min_n || max_n - min_n >= index::kMaxLevels)) return 0;
  // A page contains 590 entries on average over all row lengths, and 529 at the worst length. Text has up to 1.2
  // entries per token, with a ladder up to 1.5. Any data has up to (levels + 1) / 2 entries per token, which is reached
  // with one and two levels. Each slot also needs its last page and its directory.
  const int64_t levels = ladder ? kLadderLevels : max_n - min_n + 1;
  const int64_t entries_per_ten_tokens = any_data ? 5 * (levels + 1) : ladder ? 15 : 12;
  const int64_t entries_per_ten_pages = any_data && levels <= 2 ? 5250 : 5900;
  int64_t pages = tokens / entries_per_ten_pages * entries_per_ten_tokens +
                  tokens % entries_per_ten_pages * entries_per_ten_tokens / entries_per_ten_pages + 2 * num_slots + 1;
  if (outcomes) pages += (tokens >> index::kOutcomePageBits) + num_slots;
  return pages <= index::kMaxPages ? pages : 0;
}

int32_t ngram_npu_cpu_ngram_index_init(int32_t* index, int64_t words, int64_t num_slots) {
  using namespace ngram_npu::index;
  if (index == nullptr || num_slots < 1 || num_slots > kMaxSlots) return kInvalidParams;
  int64_t pages = (words - kHeaderWords - num_slots * kSlotWords) / (kPageWords + 1);
  pages = smaller(pages, kMaxPages);
  while (pages > 0 && ngram_npu_cpu_ngram_index_words(num_slots, pages) > words) --pages;
  if (pages < 1) return kInvalidParams;
  index[kHeaderMagic] = static_cast<int32_t>(kMagic);
  index[kHeaderSlots] = static_cast<int32_t>(num_slots);
  index[kHeaderPages] = static_cast<int32_t>(pages);
  return kOk;
}

NGRAM_NPU_EXPORT void ngram_npu_cpu_ngram_index_lengths(const int32_t* index, int64_t words, const int32_t* slots,
                                                        int64_t count, int64_t* lengths) {
  cpu::Arena arena;
  const bool is_usable = cpu::open_arena(const_cast<int32_t*>(index), words, &arena);
  for (int64_t i = 0; i < count; ++i) {
    const bool has_slot = is_usable && slots[i] >= 0 && static_cast<uint32_t>(slots[i]) < arena.num_slots;
    lengths[i] = has_slot ? arena.slot(static_cast<uint32_t>(slots[i]))[index::kSlotLength] : 0;
  }
}
