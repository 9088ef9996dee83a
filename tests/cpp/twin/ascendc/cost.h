// What a launch cost, counted; and how long a 910B would take for it, by a model.
#pragma once

#include <cstdint>

namespace ngram_npu::twin {

enum Pipe : int { kS = 0, kV = 1, kMte2 = 2, kMte3 = 3, kPipes = 4 };

// The model's constants, in cycles of the vector core's clock unless said otherwise. docs/design/ascendc-twin.md says
// where each comes from; most are assumptions, and the times that come out are a model's.
struct CostModel {
  double clock_ghz = 1.85;
  double gm_bytes_per_second = 1.6e12;  // all cores together
  int cores = 48;                       // that share it
  double dma_latency = 1000;            // from issue to the first byte, ~0.5 us
  double vector_startup = 20;           // of every vector instruction
  double vector_cycles_per_repeat = 1;  // 256 bytes of the widest operand
  double gather_cycles_per_repeat = 8;  // 64 addresses
  double issue = 8;                     // the scalar unit's work per instruction it hands to a pipe
  double scalar_ub = 4;                 // GetValue, SetValue on UB
  double scalar_gm_hit = 4;
  double scalar_gm_miss = 300;
  double sync = 20;  // a flag set and waited for, a barrier

  double bytes_per_cycle() const { return gm_bytes_per_second / cores / (clock_ghz * 1e9); }
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
  double cycles = 0;  // of the slowest pipe, by the model; of several cores: of the slowest core

  void add(const Cost& o) {
    gm_to_ub_bytes += o.gm_to_ub_bytes;
    ub_to_gm_bytes += o.ub_to_gm_bytes;
    copies += o.copies;
    vector_instructions += o.vector_instructions;
    vector_repeats += o.vector_repeats;
    scalar_ub += o.scalar_ub;
    scalar_gm += o.scalar_gm;
    scalar_gm_misses += o.scalar_gm_misses;
    syncs += o.syncs;
    cycles = cycles > o.cycles ? cycles : o.cycles;
  }
};

}  // namespace ngram_npu::twin
