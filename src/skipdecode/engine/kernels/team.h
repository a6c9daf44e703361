// Threads that work through phases together: every thread calls the same functions with its own number.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include <sched.h>

#ifdef _OPENMP
#include <omp.h>
#else
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Waits a few microseconds on a quiet machine, where a system call would cost more; gives way on a busy one.
class Barrier {
 public:
  void wait(int64_t size) {
    if (size == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins > kSpins) sched_yield();
      else pause();
    }
  }

 private:
  static constexpr int kSpins = 4000;
  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

constexpr int64_t kLine = 16;  // numbers of a cache line

struct Team {
  int64_t id, size;
  Barrier* barrier;
  std::vector<float>* memory;  // that all threads see
  void wait() const { barrier->wait(size); }
  // Room for `floats` numbers that all threads see; what it held is not needed any more. All threads must ask.
  float* shared(int64_t floats) const {
    wait();
    if (id == 0 && (int64_t)memory->size() < floats + kLine) memory->resize(floats + kLine);
    wait();
    return (float*)(((uintptr_t)memory->data() + 63) & ~(uintptr_t)63);
  }
};

#ifndef _OPENMP
// Threads of the standard library, which wait between calls. One call runs at a time.
class Pool {
 public:
  int64_t (*size)() = nullptr;  // how many threads a call has; without it, one for each processor
  void run(int64_t size, const std::function<void(int64_t)>& work) {
    const std::lock_guard<std::mutex> call(calls_);
    std::unique_lock<std::mutex> lock(mutex_);
    while (count_ < size) std::thread(&Pool::serve, this, count_++, round_).detach();
    work_ = &work, size_ = size, busy_ = size - 1, round_++;
    begin_.notify_all();
    lock.unlock();
    work(0);
    lock.lock();
    end_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  void serve(int64_t id, int64_t round) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;; round = round_) {
      begin_.wait(lock, [&] { return round_ != round; });
      if (id >= size_) continue;
      lock.unlock();
      (*work_)(id);
      lock.lock();
      if (--busy_ == 0) end_.notify_one();
    }
  }
  std::mutex calls_, mutex_;
  std::condition_variable begin_, end_;
  const std::function<void(int64_t)>* work_ = nullptr;
  int64_t count_ = 1, size_ = 0, busy_ = 0, round_ = 0;  // the calling thread is one of `count_`
};

// Never destroyed, because its threads wait for it until the process ends.
inline Pool& pool() {
  static Pool* const made = new Pool;
  return *made;
}
#endif

// work(team) on each thread of a team.
template <class Work>
void on_team(Work work) {
  Barrier barrier;
  std::vector<float> memory;
#ifdef _OPENMP
#pragma omp parallel
  work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier, &memory});
#else
  const int64_t size = pool().size ? pool().size() : std::max(1u, std::thread::hardware_concurrency());
  pool().run(size, [&](int64_t id) { work(Team{id, size, &barrier, &memory}); });
#endif
}
