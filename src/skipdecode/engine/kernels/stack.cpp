// The kernels' entry points: one linear operation, or a stack of decoder layers, on all threads.
//
// A step of a small model is some 200 phases of a few microseconds. They run in one parallel region, with a barrier between
// phases that spins.
#include <algorithm>
#include <chrono>

#include "prologue.h"

namespace {

// Phases of a layer, in order; their times are summed over layers.
enum Phase { kQkv, kAppend, kAttend, kOut, kMlpIn, kMlpOut };

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Clock {
  double* seconds;
  double last;
  void note(Phase phase) {
    if (!seconds) return;
    const double before = last;
    seconds[phase] += (last = now()) - before;
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
  return a;
}

// y += up(down(x)) on rows `from` to before `to`.
void bridge(const StackArgs& s, const LayerArgs& layer, int64_t from, int64_t to, const Team& team) {
  if (from >= to) return;
  float* hidden = s.hidden + from * layer.down.ldx;
  linear_share(with(layer.down, to - from, hidden, s.wide, 0), team);
  team.wait();
  linear_share(with(layer.up, to - from, s.wide, hidden, 1), team);
  team.wait();
}

// The bridge of a layer, on the rows before and behind those that store or run.
void bridges(const StackArgs& s, int64_t index, const Team& team) {
  const LayerArgs& layer = s.layers[index];
  const LayerRows& rows = s.layer_rows[index];
  const bool none = rows.stored == rows.end;
  if (!none) bridge(s, layer, s.bridged, rows.stored, team);
  bridge(s, layer, none ? s.bridged : std::max<int64_t>(s.bridged, rows.end), s.rows, team);
}

// A row over its root mean square.
void unit_row(const LinearArgs& map, const float* x, float* y, int64_t width) {
  LinearArgs norm = map;
  norm.k = width, norm.prologue = kRmsNorm;
  const float scale = row_stats(norm, x).scale;
  for (int64_t i = 0; i < width; i += LANES) store_some(y + i, width - i, load_some(x + i, width - i) * scale);
}

// Normed states of rows `from` to before `to` and of the tokens before each.
void features(const StackArgs& s, const LayerArgs& layer, int64_t from, int64_t to, const Team& team) {
  const int64_t width = layer.qkv.k;
  for (int64_t row = from + team.id; row < to; row += team.size)
    for (int64_t back = 0; back <= s.context_tokens; back++) {
      float* y = s.features + row * layer.map.k + back * width;
      const int64_t token = back ? s.context_rows[row * s.context_tokens + back - 1] : row;
      if (token < 0) std::fill(y, y + width, 0.0f);
      else unit_row(layer.map, s.hidden + token * width, y, width);
    }
  team.wait();
}

// Keys and values of rows `from` to before `to`, which lie behind the queries in qkv, from the states that pass by.
void mapped_keys_and_values(const StackArgs& s, const LayerArgs& layer, int64_t from, int64_t to, const Team& team) {
  if (s.context_tokens) features(s, layer, from, to, team);
  const float* x = (s.context_tokens ? s.features : s.hidden) + from * layer.map.k;
  float* y = s.qkv + from * layer.map.ldy + layer.qkv.n - layer.map.n;
  linear_share(with(layer.map, to - from, x, y, 0), team);
  if (std::find(s.positions + from, s.positions + to, 0) == s.positions + to) return;
  team.wait();
  for (int64_t row = from + team.id; row < to; row += team.size)
    if (s.positions[row] == 0) std::copy(layer.first, layer.first + layer.map.n, y + (row - from) * layer.map.ldy);
}

// A short convolution. Its inputs B * x lie in the one page of a slot, a ring; rows from `runs` on have an output. Rows of a
// text come in order, and a thread has the same columns of all of them.
template <class T>
void convolve_share(const AttentionArgs& a, int64_t page_size, int64_t runs, const Team& team) {
  const int64_t columns = a.heads * a.dim, ring = page_size / columns, lines = (columns + kLine - 1) / kLine;
  const int64_t begin = lines * team.id / team.size * kLine, end = std::min(columns, lines * (team.id + 1) / team.size * kLine);
  for (int64_t row = 0; row < a.n; row++) {
    T* page = (T*)a.pages + a.table[a.slots[row] * a.table_width] * page_size;
    const float *b = a.qkv + row * 3 * columns, *c = b + columns, *x = c + columns;
    const int64_t position = a.positions[row];
    T* now = page + position % ring * columns;
    for (int64_t i = begin; i < end; i++) narrow(b[i] * x[i], now + i);
    if (row < runs) continue;
    float* y = a.out + row * columns;
    std::copy(a.taps + begin, a.taps + end, y + begin);
    for (int64_t t = std::max<int64_t>(0, a.width - 1 - position); t < a.width; t++) {
      const T* kept = page + (position - a.width + 1 + t) % ring * columns;
      const float* tap = a.taps + (1 + t) * columns;
      for (int64_t i = begin; i < end; i++) y[i] += tap[i] * widen(kept[i]);
    }
    for (int64_t i = begin; i < end; i++) y[i] *= c[i];
  }
}

void run_layer(const StackArgs& s, int64_t index, const Team& team, Clock& clock) {
  const LayerArgs& layer = s.layers[index];
  const int64_t stored = s.layer_rows[index].stored, runs = s.layer_rows[index].runs, last = s.layer_rows[index].end;
  const int64_t n = last - runs;
  // Each buffer has a line for every row; those of the rows that run begin at `runs`.
  float *hidden = s.hidden + runs * layer.qkv.ldx, *qkv = s.qkv + runs * layer.qkv.ldy;
  float *attended = s.attended + runs * layer.out.ldx, *wide = s.wide + runs * layer.mlp_in.ldy;
  const auto attention = [&](int64_t from) {
    AttentionArgs a = layer.attention;
    a.qkv = s.qkv + from * layer.qkv.ldy, a.out = s.attended + from * layer.out.ldx, a.pages = s.pages, a.n = last - from;
    a.table = s.table + index * s.table_layer, a.slots = s.slots + from, a.positions = s.positions + from;
    a.page_tokens = s.page_tokens, a.table_width = s.table_width, a.dtype = s.page_dtype;
    return a;
  };
  const auto end = [&](Phase phase) {
    team.wait();
    clock.note(phase);
  };
  const auto add = [&](const LinearArgs& linear, const LinearArgs& norm, const float* x) {
    if (!norm.gamma) return linear_share(with(linear, n, x, hidden, 1), team);
    linear_share(with(linear, n, x, s.qkv, 0), team);
    team.wait();
    add_normed_share(with(norm, n, s.qkv, hidden, 1), team);
  };
  if (n) linear_share(with(layer.qkv, n, hidden, qkv, 0), team);
  if (runs > stored && layer.map.w) {
    mapped_keys_and_values(s, layer, stored, runs, team);
  } else if (runs > stored) {
    const LinearArgs rest = keys_and_values(layer.qkv, layer.attention.taps ? 0 : layer.attention.heads * layer.attention.dim);
    float* y = s.qkv + stored * rest.ldy + layer.qkv.n - rest.n;
    linear_share(with(rest, runs - stored, s.hidden + stored * rest.ldx, y, 0), team);
  }
  end(kQkv);
  const auto convolve = s.page_dtype == kFloat32 ? convolve_share<float> : convolve_share<uint16_t>;
  if (layer.attention.taps) convolve(attention(stored), s.page_size, runs - stored, team);
  else append_share(attention(stored), team);
  end(kAppend);
  if (!n) return;
  if (!layer.attention.taps) attend_share(attention(runs), team);
  end(kAttend);
  add(layer.out, layer.out_norm, attended);
  end(kOut);
  linear_share(with(layer.mlp_in, n, hidden, wide, 0), team);
  end(kMlpIn);
  add(layer.mlp_out, layer.mlp_norm, wide);
  end(kMlpOut);
}

}  // namespace

#ifndef _OPENMP
// Asks `size` for the number of threads before each call.
extern "C" void skipdecode_ask_threads(int64_t (*size)()) { pool().size = size; }
#endif

extern "C" void skipdecode_linear(const LinearArgs* a) {
  on_team([a](const Team& team) { linear_share(*a, team); });
}

// The layers that run or store rows, first to last; ldx and ldy of their operations fit the buffers.
extern "C" void skipdecode_stack(const StackArgs* s) {
  on_team([s](const Team& team) {
    Clock clock{team.id ? nullptr : s->seconds, now()};
    for (int64_t i = 0; i < s->count; i++) {
      if (s->layer_rows[i].stored < s->layer_rows[i].end) run_layer(*s, i, team, clock);
      if (s->layers[i].down.w) bridges(*s, i, team);
    }
  });
}
