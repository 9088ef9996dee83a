// Sources of choices for an episode (a sequence of events that a test or a fuzz target runs): random numbers, or a
// fuzzer's bytes. Also the counts of an episode's events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <string_view>

namespace ngram_npu::test {

class Choices {
 public:
  virtual ~Choices() = default;
  virtual int64_t below(int64_t n) = 0;  // returns a number from 0 to n - 1
  virtual bool has_next_event() = 0;     // called once before each event

  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }  // both inclusive
  bool one_in(int64_t n) { return below(n) == 0; }                                    // true with probability 1/n
};

class RandomChoices : public Choices {
 public:
  explicit RandomChoices(uint64_t seed, int events = 25) : engine_(seed), num_events_left_(events) {}
  int64_t below(int64_t n) override { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool has_next_event() override { return num_events_left_-- > 0; }

 private:
  std::mt19937_64 engine_;
  int num_events_left_;
};

// Choices from a fuzzer's bytes.
class ByteChoices : public Choices {
 public:
  ByteChoices(const uint8_t* data, size_t size) : next_(data), end_(data + size) {}
  // A choice among at most 256 numbers takes one byte. After the last byte, all choices are 0.
  int64_t below(int64_t n) override {
    uint64_t value = 0;
    for (int64_t range = 1; range < n && next_ < end_; range <<= 8) value = value << 8 | *next_++;
    return static_cast<int64_t>(value % static_cast<uint64_t>(n));
  }
  bool has_next_event() override { return next_ < end_; }

 private:
  const uint8_t* next_;
  const uint8_t* end_;
};

// Number of occurrences of each event, by name. Tests fail if a count is 0, because the event was then not tested.
struct EventCounts : std::map<std::string_view, int64_t> {
  using map::map;
  void operator+=(const EventCounts& other) {
    for (const auto& [name, count] : other) (*this)[name] += count;
  }
};

}  // namespace ngram_npu::test
