// A stream that runs its tasks in order in a separate thread, some of them late. After a device failure, pending tasks
// never run.
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
  ~LateStream() {  // waits until all tasks have run
    add({});
    if (thread_.joinable()) thread_.join();
  }
  int add(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) return 719;  // CUDA_ERROR_LAUNCH_FAILED
    if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
    tasks_.push_back(std::move(task));
    changed_.notify_all();
    return 0;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return failed_ || (tasks_.empty() && !busy_); });
  }
  void hold(bool is_held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = is_held;
    changed_.notify_all();
  }
  void fail() {
    const std::lock_guard<std::mutex> lock(mutex_);
    failed_ = true;
    tasks_.clear();
    changed_.notify_all();
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (unsigned turn = 1;; ++turn) {
      changed_.wait(lock, [this] { return !held_ && !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      busy_ = true;
      lock.unlock();
      if (!task) return;
      if (turn % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(turn * 2654435761u % 300));
      task();
      lock.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool busy_ = false, held_ = false, failed_ = false;
  std::thread thread_;
};

}  // namespace ngram_npu::test
