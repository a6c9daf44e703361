// The most probable token of each row of logits, and its log-probability.
#include <algorithm>

#include "team.h"
#include "vectors.h"

extern "C" {
// Mirrored field by field in native.py.
struct GreedyArgs {
  const float* logits;  // [rows, vocabulary]
  int64_t* tokens;      // [rows]: the first of equals
  float* logprobs;      // [rows]
  int64_t rows, vocabulary;
};
}

namespace {

void pick(const float* logits, int64_t count, int64_t* token, float* logprob) {
  const int64_t whole = count - count % LANES;
  vf most = splat(-INFINITY);
  for (int64_t i = 0; i < whole; i += LANES) most = larger(load(logits + i), most);
  float peak = largest_lane(most);
  for (int64_t i = whole; i < count; i++) peak = std::max(peak, logits[i]);
  vf sums{};
  for (int64_t i = 0; i < whole; i += LANES) sums += exp_fast(load(logits + i) - peak);
  float total = sum(sums);
  for (int64_t i = whole; i < count; i++) total += std::exp(logits[i] - peak);
  *token = std::min<int64_t>(count - 1, std::find(logits, logits + count, peak) - logits);
  *logprob = -std::log(total);
}

}  // namespace

extern "C" void skipdecode_greedy(const GreedyArgs* a) {
  on_team([a](const Team& team) {
    for (int64_t row = team.id; row < a->rows; row += team.size)
      pick(a->logits + row * a->vocabulary, a->vocabulary, a->tokens + row, a->logprobs + row);
  });
}
