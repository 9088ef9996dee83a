// What a check of the twin throws. It ends the launch, which returns a status and keeps the message.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace ngram_npu::twin {

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string text(const char* format, ...) {
  char buffer[512];
  va_list args;
  va_start(args, format);
  std::vsnprintf(buffer, sizeof(buffer), format, args);
  va_end(args);
  return buffer;
}

}  // namespace ngram_npu::twin

#define NGRAM_TWIN_FAULT(...) throw ::ngram_npu::twin::Fault(::ngram_npu::twin::text(__VA_ARGS__))
#define NGRAM_TWIN_CHECK(condition, ...)             \
  do {                                               \
    if (!(condition)) NGRAM_TWIN_FAULT(__VA_ARGS__); \
  } while (false)
