// A large read on all threads: the yardstick for the kernels, which should take no longer than this does over their weights.
#include "team.h"
#include "vectors.h"

// The bitwise or of `bytes` bytes (a multiple of 4096 for each thread is read; what is left over is not).
extern "C" uint32_t skipdecode_read(const char* data, int64_t bytes) {
  std::atomic<uint32_t> all{0};
  on_team([&](const Team& team) {
    // Several places at once per thread, so that several of the CPU's prefetchers work.
    constexpr int kPlaces = 4;
    const int64_t part = bytes / team.size / (kPlaces * 1024) * 1024;
    const char* from = data + team.id * part * kPlaces;
    vu sums[kPlaces] = {};
    for (int64_t i = 0; i < part; i += 64)
      for (int p = 0; p < kPlaces; p++) {
        __builtin_prefetch(from + p * part + i + 1024);
        for (int64_t j = 0; j < 64; j += 4 * LANES) sums[p] |= *(const vu_any*)(from + p * part + i + j);
      }
    const vu sum = sums[0] | sums[1] | sums[2] | sums[3];
    for (int l = 0; l < LANES; l++) all |= sum[l];
  });
  return all;
}
