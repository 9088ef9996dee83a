// Collective operations of a warp's lanes.
#include "grid.h"

namespace twin {
namespace {

template <class T, class Combine>
uint64_t reduce(const Thread* lanes, uint32_t mask, const Combine& combine) {
  bool first = true;
  T result{};
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    const T value = from_bits<T>(lanes[lane].value);
    result = first ? value : static_cast<T>(combine(result, value));
    first = false;
  }
  return bits_of(result);
}

uint32_t matching(const Thread* lanes, uint32_t mask, uint64_t value) {
  uint32_t same = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) != 0 && lanes[lane].value == value) same |= 1u << lane;
  }
  return same;
}

// The lane that this one reads; itself if the source lies outside its segment.
int source_of(const Thread& t) {
  const int lane = t.lane(), first = lane - lane % t.width;
  switch (t.collective) {
    case Collective::kShuffle: return first + (t.operand & (t.width - 1));
    case Collective::kShuffleUp: return lane - first < t.operand ? lane : lane - t.operand;
    case Collective::kShuffleDown: return lane - first + t.operand >= t.width ? lane : lane + t.operand;
    default: {  // xor: lanes of an earlier segment may be read, those of a later one may not
      const int source = lane ^ t.operand;
      return source >= first + t.width ? lane : source;
    }
  }
}

uint64_t shuffled(const Thread* lanes, const Thread& t) {
  if (t.width < 1 || t.width > kWarp || (t.width & (t.width - 1)) != 0) {
    throw violation_of("%s at %s with a width of %d", name_of(t.collective), place_of(t.site).c_str(), t.width);
  }
  if (t.operand < 0 && t.collective != Collective::kShuffle) {
    throw violation_of("%s at %s by %d lanes", name_of(t.collective), place_of(t.site).c_str(), t.operand);
  }
  const int source = source_of(t);
  if (source < 0 || source >= kWarp || (t.mask >> source & 1u) == 0) {
    throw violation_of("%s at %s: %s reads lane %d, which is not in the mask %08x", name_of(t.collective),
                       place_of(t.site).c_str(), place_of(t).c_str(), source, t.mask);
  }
  return lanes[source].value;
}

uint64_t result_for(const Thread* lanes, const Thread& t) {
  const uint32_t mask = t.mask;
  const auto count_true = [&] {
    uint32_t lanes_true = 0;
    for (int lane = 0; lane < kWarp; ++lane) {
      if ((mask >> lane & 1u) != 0 && lanes[lane].value != 0) lanes_true |= 1u << lane;
    }
    return lanes_true;
  };
  const auto add = [](uint32_t a, uint32_t b) { return a + b; };
  const auto least = [](auto a, auto b) { return b < a ? b : a; };
  const auto most = [](auto a, auto b) { return a < b ? b : a; };
  switch (t.collective) {
    case Collective::kSync: return 0;
    case Collective::kShuffle:
    case Collective::kShuffleUp:
    case Collective::kShuffleDown:
    case Collective::kShuffleXor: return shuffled(lanes, t);
    case Collective::kBallot: return count_true();
    case Collective::kAny: return count_true() != 0;
    case Collective::kAll: return count_true() == mask;
    case Collective::kMatchAny: return matching(lanes, mask, t.value);
    case Collective::kAddSigned:
    case Collective::kAddUnsigned: return reduce<uint32_t>(lanes, mask, add);
    case Collective::kMinSigned: return reduce<int32_t>(lanes, mask, least);
    case Collective::kMinUnsigned: return reduce<uint32_t>(lanes, mask, least);
    case Collective::kMaxSigned: return reduce<int32_t>(lanes, mask, most);
    case Collective::kMaxUnsigned: return reduce<uint32_t>(lanes, mask, most);
  }
  return 0;
}

}  // namespace

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kSync: return "__syncwarp";
    case Collective::kShuffle: return "__shfl_sync";
    case Collective::kShuffleUp: return "__shfl_up_sync";
    case Collective::kShuffleDown: return "__shfl_down_sync";
    case Collective::kShuffleXor: return "__shfl_xor_sync";
    case Collective::kBallot: return "__ballot_sync";
    case Collective::kAny: return "__any_sync";
    case Collective::kAll: return "__all_sync";
    case Collective::kMatchAny: return "__match_any_sync";
    default: return "__reduce_sync";
  }
}

bool finish_collective(Block& block, const Thread& last) {
  const int warp = last.warp();
  Thread* lanes = &block.threads[static_cast<size_t>(block.first_of_warp(warp))];
  const int count = block.lanes_of_warp(warp);
  const uint32_t mask = last.mask;
  const uint32_t waiting = block.in_collective[static_cast<size_t>(warp)];
  bool all_here = (waiting & mask) == mask;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((mask >> lane & 1u) == 0) continue;
    if (lane >= count || lanes[lane].state == State::kDone) {
      throw violation_of("%s at %s: the mask %08x of %s names lane %d, which %s", name_of(last.collective),
                         place_of(last.site).c_str(), mask, place_of(last).c_str(), lane,
                         lane >= count ? "the block does not have" : "has left the kernel");
    }
    if ((waiting >> lane & 1u) == 0) continue;
    const Thread& other = lanes[lane];
    if (other.mask == mask && other.collective == last.collective) continue;
    all_here = false;
    if ((other.mask >> last.lane() & 1u) != 0) {  // neither can ever continue
      throw violation_of("%s waits in %s at %s with mask %08x, %s in %s at %s with mask %08x", place_of(last).c_str(),
                         name_of(last.collective), place_of(last.site).c_str(), mask, place_of(other).c_str(),
                         name_of(other.collective), place_of(other.site).c_str(), other.mask);
    }
  }
  if (!all_here) return false;
  uint64_t results[kWarp];
  for (int lane = 0; lane < count; ++lane) {
    if ((mask >> lane & 1u) != 0) results[lane] = result_for(lanes, lanes[lane]);
  }
  for (int lane = 0; lane < count; ++lane) {
    if ((mask >> lane & 1u) != 0) lanes[lane].value = results[lane];
  }
  return true;
}

}  // namespace twin
