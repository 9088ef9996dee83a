// Collective operations of a warp's lanes.
#include <algorithm>

#include "grid.h"

namespace twin {
namespace {

// The lane that this one reads.
int source_of(const Thread& t) {
  if (t.collective == Collective::kShuffle) return t.operand & (kWarp - 1);
  return t.lane() < t.operand ? t.lane() : t.lane() - t.operand;
}

uint64_t shuffled(const Thread* lanes, const Thread& t) {
  if (t.operand < 0 && t.collective != Collective::kShuffle) {
    throw Violation{text_of("%s at %s by %d lanes", name_of(t.collective), place_of(t.site).c_str(), t.operand)};
  }
  const int source = source_of(t);
  if ((t.mask >> source & 1u) == 0) {
    throw Violation{text_of("%s at %s: %s reads lane %d, which is not in the mask %08x", name_of(t.collective),
                            place_of(t.site).c_str(), place_of(t).c_str(), source, t.mask)};
  }
  return lanes[source].value;
}

uint64_t result_for(const Thread* lanes, const Thread& t) {
  uint32_t lanes_true = 0;
  uint64_t most = 0;
  for (int lane = 0; lane < kWarp; ++lane) {
    if ((t.mask >> lane & 1u) == 0) continue;
    if (lanes[lane].value != 0) lanes_true |= 1u << lane;
    most = std::max(most, lanes[lane].value);
  }
  switch (t.collective) {
    case Collective::kSync: return 0;
    case Collective::kShuffle:
    case Collective::kShuffleUp: return shuffled(lanes, t);
    case Collective::kBallot: return lanes_true;
    case Collective::kAny: return lanes_true != 0;
    case Collective::kMax: return most;
  }
  return 0;
}

}  // namespace

const char* name_of(Collective kind) {
  switch (kind) {
    case Collective::kSync: return "__syncwarp";
    case Collective::kShuffle: return "__shfl_sync";
    case Collective::kShuffleUp: return "__shfl_up_sync";
    case Collective::kBallot: return "__ballot_sync";
    case Collective::kAny: return "__any_sync";
    default: return "__reduce_max_sync";
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
      throw Violation{text_of("%s at %s: the mask %08x of %s names lane %d, which %s", name_of(last.collective),
                              place_of(last.site).c_str(), mask, place_of(last).c_str(), lane,
                              lane >= count ? "the block does not have" : "has left the kernel")};
    }
    if ((waiting >> lane & 1u) == 0) continue;
    const Thread& other = lanes[lane];
    if (other.mask == mask && other.collective == last.collective) continue;
    all_here = false;
    if ((other.mask >> last.lane() & 1u) != 0) {  // neither can ever continue
      throw Violation{text_of("%s waits in %s at %s with mask %08x, %s in %s at %s with mask %08x",
                              place_of(last).c_str(), name_of(last.collective), place_of(last.site).c_str(), mask,
                              place_of(other).c_str(), name_of(other.collective), place_of(other.site).c_str(),
                              other.mask)};
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
