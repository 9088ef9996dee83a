// IEEE binary16: stored as the device stores it, computed in float and rounded to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace ngram_npu::twin {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u;
  const uint32_t mantissa = h & 1023u;
  uint32_t bits = 0;
  if (exponent == 31) {
    bits = sign | 0x7F800000u | mantissa << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | mantissa << 13;
  } else {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign != 0 ? -magnitude : magnitude;
  }
  float f = 0;
  std::memcpy(&f, &bits, sizeof(f));
  return f;
}

inline uint16_t float_to_half(float f) {
  uint32_t bits = 0;
  std::memcpy(&bits, &f, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {                                               // subnormal: let float addition round
    float rest = 0;
    std::memcpy(&rest, &magnitude, sizeof(rest));
    rest += 0.5f;
    uint32_t sum = 0;
    std::memcpy(&sum, &rest, sizeof(sum));
    return static_cast<uint16_t>(sign | (sum - 0x3F000000u));
  }
  const uint32_t odd = magnitude >> 13 & 1u;
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xFFFu + odd) >> 13);
}

}  // namespace ngram_npu::twin

struct half {
  uint16_t bits = 0;

  half() = default;
  half(float f) : bits(ngram_npu::twin::float_to_half(f)) {}               // NOLINT: as the device's
  operator float() const { return ngram_npu::twin::half_to_float(bits); }  // NOLINT
};
static_assert(sizeof(half) == 2);
