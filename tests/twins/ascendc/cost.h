// The counted cost of a launch, and the time that a 910B would take for it by a model.
#pragma once

#include <cstdint>

namespace ngram_npu::twin {

enum Pipe : int { kS = 0, kV = 1, kMte2 = 2, kMte3 = 3, kPipes = 4 };

// The model's price of each thing, in cycles of the vector core's clock unless said otherwise. By default everything
// is free; a caller that wants times sets the prices and names their sources (tools/bench/ops/ascendc_model.py).
struct CostModel {
  double copy_bytes_per_cycle = 1e9;  // of one core
  double gm_bytes_per_cycle = 1e9;    // that all cores of a launch share
  double copy_latency = 0;            // from a copy's last byte until another pipe may go on
  double vector_startup = 0;          // of every vector instruction
  double vector_repeat = 0;           // 256 bytes of the widest operand
  double gather_repeat = 0;           // as many addresses as make 256 bytes of results
  double issue = 0;                   // the scalar unit's work for an instruction that it hands to a pipe
  double scalar_ub = 0;               // GetValue, SetValue on UB
  double scalar_gm = 0;               // a load that hits the scalar cache
  double scalar_gm_miss = 0;          // a load that misses it
  double sync = 0;                    // a flag set and waited for, a barrier
  double same_line = 0;               // a copy's turn at 512 bytes that another core is accessing

  double cycles_per_byte(int32_t cores) const {
    const double share = gm_bytes_per_cycle / cores;
    return 1 / (share < copy_bytes_per_cycle ? share : copy_bytes_per_cycle);
  }
};

struct Cost {
  uint64_t gm_to_ub_bytes = 0;
  uint64_t ub_to_gm_bytes = 0;
  uint64_t copies = 0;
  uint64_t vector_instructions = 0;
  uint64_t vector_repeats = 0;
  uint64_t scalar_ub = 0;
  uint64_t scalar_gm = 0;
  uint64_t scalar_gm_misses = 0;
  uint64_t syncs = 0;
  double cycles = 0;  // modelled: until the slowest pipe is done

  // Adds the counts only: blocks run in parallel, so their cycles do not add up.
  void add_counts(const Cost& o) {
    gm_to_ub_bytes += o.gm_to_ub_bytes;
    ub_to_gm_bytes += o.ub_to_gm_bytes;
    copies += o.copies;
    vector_instructions += o.vector_instructions;
    vector_repeats += o.vector_repeats;
    scalar_ub += o.scalar_ub;
    scalar_gm += o.scalar_gm;
    scalar_gm_misses += o.scalar_gm_misses;
    syncs += o.syncs;
  }
};

}  // namespace ngram_npu::twin
