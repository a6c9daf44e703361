// What the kernels are told, mirrored field by field in native.py, and their parts that one thread of a team runs.
#pragma once

#include <cstdint>

#include "team.h"

enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kW8A8 = 3 };
enum Prologue : int32_t { kNone = 0, kRmsNorm = 1, kLayerNorm = 2, kSwiGlu = 3, kGeGluTanh = 4 };
enum Activation : int32_t { kIdentity = 0, kRelu = 1, kGeluTanh = 2, kReluSquared = 3, kXielu = 4 };

enum QueryNorm : int32_t { kBeforeRotation = 0, kAfterRotation = 1, kWide = 2 };

extern "C" {
// With kSwiGlu and kGeGluTanh, x holds 2k columns: gate, then up.
struct LinearArgs {
  const float* x;
  const void* w;       // [n] rows of ldw bytes; of int8 padded with zeros to whole steps of columns; W8A8: blocks of rows
  const void* scales;  // int8, W8A8: fp32 [n]
  const float* bias;   // [n] or null
  const float* gamma;  // [k], norm prologues
  const float* beta;   // [k] or null
  float* y;
  int64_t m, n, k, ldw, ldx, ldy;
  int32_t dtype, prologue, activation, accumulate;  // accumulate: y += instead of y =
  float eps;
  int32_t round;  // activations meet the weights as bf16, where the CPU multiplies bf16
  float constants[3];  // xIELU: factors of the positive and the negative branch, and beta
};

struct AttentionArgs {
  float* qkv;  // [n, (heads + 2 kv_heads) * dim]; queries and keys are rotated in place
  float* out;  // [n, heads * dim]
  void* pages;
  const int32_t* table;      // [slots, table_width]: page ids of this layer
  const int32_t* slots;      // [n]
  const int32_t* positions;  // [n]
  const float* cos;          // [positions, rotated / 2] or null: no rotary positions
  const float* sin;
  const float* q_gamma;  // [dim] or null: RMSNorm of each query head; [heads * dim] with kWide: of all heads together
  const float* k_gamma;
  const float* q_scale;  // [positions] or null: factors of queries
  const float* taps;     // [1 + width, heads * dim] or null: a short convolution's bias and taps, the oldest token's first
  int64_t n, heads, kv_heads, dim, page_tokens, table_width, window;  // window 0: every earlier token
  int64_t rotated, width;                                             // first columns of a head that are rotated; taps
  float scale, eps, cap;                                              // cap: of the scores, cap * tanh(score / cap); 0: none
  int32_t dtype, norm, pairs;  // norm: a QueryNorm; pairs: neighbours are rotated against each other, not halves
};

struct LayerArgs {
  LinearArgs qkv, out, mlp_in, mlp_out;
  LinearArgs out_norm, mlp_norm;  // of what `out` and `mlp_out` add; without gamma: none
  AttentionArgs attention;
  LinearArgs down, up;       // of the bridge over this layer; without weights: none
  LinearArgs map;            // keys and values of rows that store them and do not run, from their features; or none
  const float* first;        // [map.n]: instead of it, at position 0
};

// Rows of a layer: those from `stored` store keys and values, and those from `runs` to before `end` run.
struct LayerRows {
  int32_t stored, runs, end;
};

struct StackArgs {
  const LayerArgs* layers;
  const LayerRows* layer_rows;  // [layers]
  // [rows, context_tokens]: for a map's features, the rows of the tokens before each, -1 where there is none
  const int32_t* context_rows;
  float *hidden, *qkv, *attended, *wide, *features;
  void* pages;
  const int32_t *table, *slots, *positions;  // table: [layers, slots, table_width]
  double* seconds;                           // [6] or null: added to, by phase (see stack.cpp)
  int64_t count, page_tokens, table_width, table_layer;  // table_layer: entries of one layer
  int64_t context_tokens;                                // states before its own that a row's features hold
  int64_t page_size;                                     // numbers of a page
  int64_t bridged, rows;                                 // from row `bridged` on, rows take the bridges of layers that they skip
  int32_t page_dtype, padding;
};
}

// y for this thread's share of the weight rows.
void linear_share(const LinearArgs& a, const Team& team);
// A row x as bf16 or fp32 weights meet it: through the prologue, rounded where they round it; zeros to the end of its last step.
void activations_met(const LinearArgs& a, const float* x, float* out);
// y += norm(x) for this thread's share of the rows.
void add_normed_share(const LinearArgs& a, const Team& team);
// Rotates and stores keys and values of this thread's share of the rows; then, when all have: attends.
void append_share(const AttentionArgs& a, const Team& team);
void attend_share(const AttentionArgs& a, const Team& team);
