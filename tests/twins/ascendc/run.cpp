#include "run.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

namespace ngram_npu::twin {

namespace {

// Allocating a core is expensive, so cores are kept and reused.
class Cores {
 public:
  std::unique_ptr<Core> take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return std::make_unique<Core>();
    std::unique_ptr<Core> core = std::move(idle_.back());
    idle_.pop_back();
    return core;
  }
  void give_back(std::unique_ptr<Core> core) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(core));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Core>> idle_;
};

}  // namespace

Outcome run(const std::vector<Region>& regions, int32_t blocks, const std::function<void()>& kernel,
            const Options& options) {
  const GlobalMemory gm(regions);
  Outcome outcome;
  outcome.costs.resize(static_cast<size_t>(blocks));
  std::vector<AccessLog> logs(static_cast<size_t>(blocks));
  std::vector<int32_t> order(static_cast<size_t>(blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937_64(options.seed));

  std::atomic<size_t> next{0};
  std::mutex mutex;
  static Cores cores;
  const auto work = [&] {
    std::unique_ptr<Core> core = cores.take();
    Core::of_this_thread() = core.get();
    for (size_t i = next++; i < order.size(); i = next++) {
      const size_t block = static_cast<size_t>(order[i]);
      try {
        core->begin(&gm, order[i], blocks, options.ub_bytes, options.model, options.races_allowed);
        kernel();
        core->end(logs[block], outcome.costs[block]);
      } catch (const Fault& fault) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (outcome.fault.empty()) outcome.fault = fault.what();
        next = order.size();
      }
    }
    cores.give_back(std::move(core));
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < std::min(options.threads, blocks); ++t) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();

  if (outcome.fault.empty() && options.model.same_line > 0) outcome.same_line = copies_at_one_line(logs);
  if (outcome.fault.empty() && !options.races_allowed) {
    try {
      check_races(logs);
    } catch (const Fault& fault) {
      outcome.fault = fault.what();
    }
  }
  return outcome;
}

}  // namespace ngram_npu::twin
