#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "grid.h"

namespace twin {

static uint32_t lanes_that_run(const Block& block, int warp) {
  uint32_t lanes = 0;
  for (int lane = 0; lane < block.lanes_of_warp(warp); ++lane) {
    const auto number = static_cast<size_t>(block.first_of_warp(warp) + lane);
    if (block.threads[number].state != State::kDone) lanes |= 1u << lane;
  }
  return lanes;
}

std::string place_of(const Thread& thread) {
  const uint3 block = thread.block->index;
  return text_of("thread %d of block (%u, %u, %u)", thread.number, block.x, block.y, block.z);
}

std::string place_of(const Site& site) {
  const char* name = std::strrchr(site.file, '/');
  return std::string(name == nullptr ? site.file : name + 1) + ":" + std::to_string(site.line);
}

std::string text_of(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  return text;
}

std::string describe_waiting(const Block& block) {
  std::string text;
  int shown = 0;
  const Thread* before = nullptr;
  for (const Thread& t : block.threads) {
    if (t.state == State::kDone) continue;
    const bool same =
        before != nullptr && before->state == t.state && before->site.line == t.site.line && before->mask == t.mask;
    before = &t;
    if (same) continue;
    if (++shown > 4) return text + "; ...";
    text += (text.empty() ? "" : "; ") + place_of(t) + " waits ";
    if (t.state == State::kAtBarrier) {
      text += "at the barrier of " + place_of(t.site);
    } else {
      text += text_of("in %s at %s for the lanes %08x, of which %08x have left the kernel", name_of(t.collective),
                      place_of(t.site).c_str(), t.mask, t.mask & ~lanes_that_run(block, t.warp()));
    }
  }
  return text;
}

}  // namespace twin
