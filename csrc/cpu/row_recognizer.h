// Finds the request of each row of a token buffer, because vLLM does not pass request ids to a custom class.
//
// The runner moves rows: it swaps and condenses them when requests finish, removes preempted requests, and puts them
// into other rows later. A drafter that has state per request (a slot of an index) has to find the request again. A row
// is assumed to contain the request of a slot if
//
// - the row's length without the newly sampled tokens is at least the slot's length, and
// - up to 14 of the row's tokens equal those of the slot: the last six tokens before the slot's length, and the tokens
//   at positions 4^0 to 4^7 from the start of the row, as far as they are before the slot's length.
//
// The row may have grown by more than the sampled tokens, because vLLM does not call the drafter in steps in which any
// request is within k tokens of max_model_len, although rows grow in them. So a row that begins with the text of an
// absent request gets that request's slot: the next turn of a conversation continues with the slot of the previous
// turn, if no other request has got this slot. An absent request keeps its slot until the slot is needed; the request
// absent longest loses its slot first.
//
// Limits: two requests may have the same tokens at all of these positions and differ elsewhere. One of the two requests
// may get the slot of the other if they swap rows or if the other request has finished. The index then describes
// another request's tokens. Hits are verified against the row, and drafts by the model, so the result is a missed or a
// worse draft, never a wrong token. Requests that are equal up to the slot's length (n samples of one prompt) may swap
// slots without any effect.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/common.h"

namespace ngram_npu::cpu {

class RowRecognizer {
 public:
  using Rows = TokenRows<const int32_t>;

  explicit RowRecognizer(int64_t num_slots)
      : slots_(static_cast<size_t>(num_slots)), last_seen_(static_cast<size_t>(num_slots)) {}

  int64_t num_slots() const { return static_cast<int64_t>(slots_.size()); }

  // Writes the slot of each of the first `batch` rows to `slots`, and returns the rows with a new request. Expects
  // batch <= rows.rows and batch <= num_slots(). A row with an invalid length has no request.
  std::vector<int64_t> assign_slots(const Rows& rows, const int32_t* num_tokens, const int32_t* num_sampled,
                                    int64_t batch, int32_t* slots);

  // Frees the slots of requests that had no row for more than `steps` steps, and returns these slots.
  std::vector<int32_t> free_absent_slots(int64_t steps);

  // The slot of each row in the previous step.
  const std::vector<int32_t>& row_slots() const { return row_slots_; }

 private:
  static constexpr int kTailTokens = 6, kPowers = 8, kWidth = kTailTokens + kPowers;
  static constexpr int32_t kFree = -1;  // as a length: the slot is free; as a slot: the row has no slot yet

  using Fingerprint = std::array<int32_t, kWidth>;

  // One cache line. If no request has moved, only this line and the row's tokens are read per row.
  struct alignas(64) Slot {
    int32_t length = kFree;
    Fingerprint fingerprint{};  // the request's fingerprint at that length
  };

  struct Lengths {
    int32_t old_length;  // length without the newly sampled tokens
    int32_t new_length;  // length with the newly sampled tokens
  };

  static int32_t fingerprint_position(int32_t length, int i);
  static Fingerprint compute_fingerprint(const Rows& rows, int64_t row, int32_t length);
  static uint64_t compute_hash(int32_t length, const Fingerprint& fingerprint);
  static std::vector<Lengths> read_lengths(const Rows& rows, const int32_t* num_tokens, const int32_t* num_sampled,
                                           int64_t batch);
  bool may_continue(const Rows& rows, int64_t row, int32_t old_length, const Slot& slot) const;
  void find_unmoved_requests(const Rows& rows, const std::vector<Lengths>& lengths, int32_t* slots) const;
  std::vector<char> find_slots_in_use(const int32_t* slots, int64_t batch) const;
  std::vector<int32_t> find_absent_slots(const int32_t* slots, int64_t batch) const;
  // Assign absent slots to rows that grew by the sampled tokens, then to rows that grew by more.
  void find_moved_requests(const Rows& rows, const std::vector<Lengths>& lengths,
                           const std::vector<int64_t>& rows_without_slot, const std::vector<int32_t>& absent_slots,
                           int32_t* slots) const;
  void find_requests_that_grew_by_more(const Rows& rows, const std::vector<Lengths>& lengths,
                                       const std::vector<int64_t>& rows_without_slot,
                                       const std::vector<int32_t>& absent_slots, int32_t* slots) const;
  void assign_oldest_slots(const std::vector<int64_t>& rows, int32_t* slots, int64_t batch) const;

  std::vector<Slot> slots_;
  std::vector<int64_t> last_seen_;  // last step in which a slot's request had a row; 0: none, or the slot was freed
  std::vector<int32_t> row_slots_;  // slot of each row in the previous step
  int64_t step_ = 0;
};

}  // namespace ngram_npu::cpu
