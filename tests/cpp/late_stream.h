// A simulated device stream. It runs its tasks in order in a separate thread, every seventh task after a delay of less
// than 300 us. After a simulated device failure, pending tasks never run.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace ngram_npu::test {

class LateStream {
 public:
  LateStream() = default;
  LateStream(const LateStream&) = delete;
  LateStream& operator=(const LateStream&) = delete;
  // Waits until all tasks have run.
  ~LateStream() {
    add_task({});  // an empty task ends the thread
    if (thread_.joinable()) thread_.join();
  }
  // Returns 0, or CUDA's error after a device failure.
  int add_task(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (has_failed_) return 719;  // CUDA_ERROR_LAUNCH_FAILED
    if (!thread_.joinable()) thread_ = std::thread([this] { run_tasks(); });
    tasks_.push_back(std::move(task));
    state_changed_.notify_all();
    return 0;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    state_changed_.wait(lock, [this] { return has_failed_ || (tasks_.empty() && !is_busy_); });
  }
  // While the stream is held, no further task starts.
  void hold(bool is_held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_held_ = is_held;
    state_changed_.notify_all();
  }
  void fail() {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_failed_ = true;
    tasks_.clear();
    state_changed_.notify_all();
  }

 private:
  void run_tasks() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned task_number = 1;; ++task_number) {
      state_changed_.wait(lock, [this] { return !is_held_ && !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      is_busy_ = true;
      lock.unlock();
      if (!task) return;
      if (task_number % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(task_number * 2654435761u % 300));
      task();
      lock.lock();
      is_busy_ = false;
      state_changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable state_changed_;
  std::deque<std::function<void()>> tasks_;
  bool is_busy_ = false, is_held_ = false, has_failed_ = false;
  std::thread thread_;
};

}  // namespace ngram_npu::test
