// A stand-in for the CUDA driver, under its own name: a stream that runs host functions in order, in a thread of its
// own, some of them late. Copies are the stand-in's, as are errors: with a failed device what is pending never runs.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace {

class Stream {
 public:
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
  void hold(bool held) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_ = held;
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

Stream& of(void* stream) { return *static_cast<Stream*>(stream); }

}  // namespace

extern "C" {

int cuLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  return of(stream).add([=] { function(data); });
}

void* stand_in_stream() { return new Stream; }  // as a context's thread, it lives until the process ends
void stand_in_copy(void* stream, void* to, const void* from, size_t bytes) {
  of(stream).add([=] { std::memcpy(to, from, bytes); });
}
void stand_in_wait(void* stream) { of(stream).wait(); }
void stand_in_hold(void* stream, bool held) { of(stream).hold(held); }
void stand_in_fail(void* stream) { of(stream).fail(); }
}
