// The choices of an episode, random or from a fuzzer's bytes, and the counts of its events.
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
  virtual int64_t below(int64_t n) = 0;  // 0 .. n - 1
  virtual bool more() = 0;               // whether the episode has another event

  int64_t from(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
};

class RandomChoices : public Choices {
 public:
  explicit RandomChoices(uint64_t seed, int events = 25) : engine_(seed), left_(events) {}
  int64_t below(int64_t n) override { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  bool more() override { return left_-- > 0; }

 private:
  std::mt19937_64 engine_;
  int left_;
};

// Choices from a fuzzer's bytes.
class Bytes : public Choices {
 public:
  Bytes(const uint8_t* at, size_t size) : at_(at), end_(at + size) {}
  // A choice among few takes one byte; after the last byte all choices are 0.
  int64_t below(int64_t n) override {
    uint64_t value = 0;
    for (int64_t range = 1; range < n && at_ < end_; range <<= 8) value = value << 8 | *at_++;
    return static_cast<int64_t>(value % static_cast<uint64_t>(n));
  }
  bool more() override { return at_ < end_; }

 private:
  const uint8_t* at_;
  const uint8_t* end_;
};

// Counts by name. An event with count 0 was not tested.
struct EventCounts : std::map<std::string_view, int64_t> {
  using map::map;
  void operator+=(const EventCounts& other) {
    for (const auto& [name, count] : other) (*this)[name] += count;
  }
};

}  // namespace ngram_npu::test
