// Threads that work through phases together: every thread calls the same functions with its own number.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include <sched.h>

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
