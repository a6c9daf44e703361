// The kernels' entry points: one linear operation, or a stack of decoder layers, on all threads.
//
// A step of a small model is some 200 phases of a few microseconds. They run in one parallel region, with a barrier between
// phases that spins.
#include <algorithm>

#include <omp.h>

#include "prologue.h"

namespace {

// Phases of a layer, in order; their times are summed over layers.
enum Phase { kQkv, kAppend, kAttend, kOut, kMlpIn, kMlpOut };

struct Clock {
  double* seconds;
  double last;
  void note(Phase phase, bool on) {
    if (!on) return;
    const double now = omp_get_wtime();
    seconds[phase] += now - last;
    last = now;
  }
};

LinearArgs with(LinearArgs a, int64_t m, const float* x, float* y, int32_t accumulate) {
  a.m = m, a.x = x, a.y = y, a.accumulate = accumulate;
  return a;
}

// The rows of the fused weights that make keys and values, behind `queries` rows that make queries.
LinearArgs keys_and_values(LinearArgs a, int64_t queries) {
  if (a.dtype == kW8A8) queries = queries / 16 * 16;  // whole blocks: some queries come out too, in their places
  a.w = (const char*)a.w + queries * a.ldw, a.n -= queries;
  if (a.bias) a.bias += queries;
  if (a.dtype == kInt8 || a.dtype == kW8A8) a.scales = (const float*)a.scales + queries;
  if (a.dtype == kInt4) a.scales = (const int32_t*)a.scales + queries * a.ldw * 2 / 32;
  return a;
}

// y += up(down(x)) on the rows that pass a layer by.
void bridge(const StackArgs& s, int64_t index, const Team& team) {
  const LayerArgs& layer = s.layers[index];
  const int64_t from = s.bridged_from[index], n = s.bridged_to[index] - from;
  float* hidden = s.hidden + from * layer.down.ldx;
  linear_share(with(layer.down, n, hidden, s.wide, 0), team);
  team.wait();
  linear_share(with(layer.up, n, s.wide, hidden, 1), team);
  team.wait();
}

// A row over its root mean square.
void unit_row(const LinearArgs& map, const float* x, float* y, int64_t width) {
  LinearArgs norm = map;
  norm.k = width, norm.prologue = kRmsNorm;
  const float scale = row_stats(norm, x).scale;
  const int64_t whole = width - width % LANES;
  for (int64_t i = 0; i < whole; i += LANES) store(y + i, load(x + i) * scale);
  for (int64_t i = whole; i < width; i++) y[i] = x[i] * scale;
}

// Normed states of rows `n` to `stored` and of the tokens before each.
void features(const StackArgs& s, const LayerArgs& layer, int64_t n, int64_t stored, const Team& team) {
  const int64_t width = layer.qkv.k;
  for (int64_t row = n + team.id; row < stored; row += team.size)
    for (int64_t tap = 0; tap <= s.taps; tap++) {
      float* to = s.features + row * layer.map.k + tap * width;
      const int64_t from = tap ? s.before[row * s.taps + tap - 1] : row;
      if (from < 0) std::fill(to, to + width, 0.0f);
      else unit_row(layer.map, s.hidden + from * width, to, width);
    }
  team.wait();
}

// Keys and values of rows `n` to `stored`, which lie behind the queries in qkv, from the states that pass by.
void mapped_keys_and_values(const StackArgs& s, const LayerArgs& layer, int64_t n, int64_t stored, const Team& team) {
  if (s.taps) features(s, layer, n, stored, team);
  const float* x = (s.taps ? s.features : s.hidden) + n * layer.map.k;
  float* y = s.qkv + n * layer.map.ldy + layer.qkv.n - layer.map.n;
  linear_share(with(layer.map, stored - n, x, y, 0), team);
  if (std::find(s.positions + n, s.positions + stored, 0) == s.positions + stored) return;
  team.wait();
  for (int64_t row = n + team.id; row < stored; row += team.size)
    if (s.positions[row] == 0) std::copy(layer.first, layer.first + layer.map.n, y + (row - n) * layer.map.ldy);
}

void run_layer(const StackArgs& s, int64_t index, const Team& team, Clock& clock) {
  const LayerArgs& layer = s.layers[index];
  const int64_t n = s.counts[index], stored = s.stored[index];
  const bool timed = clock.seconds != nullptr;
  AttentionArgs attention = layer.attention;
  attention.qkv = s.qkv, attention.out = s.attended, attention.pages = s.pages, attention.n = stored;
  attention.table = s.table + index * s.table_layer, attention.slots = s.slots, attention.positions = s.positions;
  attention.page_tokens = s.page_tokens, attention.table_width = s.table_width, attention.dtype = s.page_dtype;
  const auto end = [&](Phase phase) {
    team.wait();
    clock.note(phase, timed);
  };
  const auto add = [&](const LinearArgs& linear, const LinearArgs& norm, const float* x) {
    if (!norm.gamma) return linear_share(with(linear, n, x, s.hidden, 1), team);
    linear_share(with(linear, n, x, s.qkv, 0), team);
    team.wait();
    add_normed_share(with(norm, n, s.qkv, s.hidden, 1), team);
  };
  if (n) linear_share(with(layer.qkv, n, s.hidden, s.qkv, 0), team);
  if (stored > n && layer.map.w) {
    mapped_keys_and_values(s, layer, n, stored, team);
  } else if (stored > n) {
    const int64_t queries = attention.heads * attention.dim;
    const LinearArgs rest = keys_and_values(layer.qkv, queries);
    linear_share(with(rest, stored - n, s.hidden + n * rest.ldx, s.qkv + n * rest.ldy + layer.qkv.n - rest.n, 0), team);
  }
  end(kQkv);
  append_share(attention, team);
  end(kAppend);
  if (!n) return;
  attention.n = n;
  attend_share(attention, team);
  end(kAttend);
  add(layer.out, layer.out_norm, s.attended);
  end(kOut);
  linear_share(with(layer.mlp_in, n, s.hidden, s.wide, 0), team);
  end(kMlpIn);
  add(layer.mlp_out, layer.mlp_norm, s.wide);
  end(kMlpOut);
}

template <class Work>
void with_team(Work work) {
  Barrier barrier;
  std::vector<float> memory;
#pragma omp parallel
  work(Team{omp_get_thread_num(), omp_get_num_threads(), &barrier, &memory});
}

}  // namespace

extern "C" int32_t skipdecode_multiplies_bytes() {
#if defined(__AVX512VNNI__)
  return 1;
#else
  return 0;
#endif
}

extern "C" void skipdecode_linear(const LinearArgs* a) {
  with_team([a](const Team& team) { linear_share(*a, team); });
}

// The layers that run or store rows, first to last; ldx and ldy of their operations fit the buffers.
extern "C" void skipdecode_stack(const StackArgs* s) {
  with_team([s](const Team& team) {
    Clock clock{team.id ? nullptr : s->seconds, omp_get_wtime()};
    for (int64_t i = 0; i < s->count; i++) {
      if (s->stored[i]) run_layer(*s, i, team, clock);
      if (s->bridged_from && s->layers[i].down.w && s->bridged_from[i] < s->bridged_to[i]) bridge(*s, i, team);
    }
  });
}
